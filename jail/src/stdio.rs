//! The standard streams of the command.
//!
//! An open file is a way around the jail's view: `/proc/self/fd/0` opens the same file again, for reading or writing
//! as the caller may, on the mount outside. So a file is passed on as it is only if the command can write it anyway, or
//! the caller opened it for both. Otherwise
//!
//! - a file open for reading is opened again on a read-only mount of its own, at the same offset,
//! - a file open for writing is replaced by a pipe, and the proxy copies from it, as it does to standard input where
//!   the file cannot be opened again (it has no name any more, or the caller may not open it),
//! - a directory is refused: every path that starts in it would be outside.
//!
//! Terminals, pipes, sockets and character devices are passed on as they are.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, bail};
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::filesystem_view::FilesystemView;
use sys::mount::{self as kernel, MountRestriction};

/// Standard input, output and error of the command.
pub type CommandStdio = [CommandStream; 3];

/// One standard stream of the command.
#[derive(Clone, Debug)]
pub enum CommandStream {
    /// That of the caller.
    Inherited,
    /// The null device.
    Null,
    Pipe(Arc<OwnedFd>),
    /// The caller's standard input, a file at this path, on a read-only mount.
    ReadOnly(PathBuf),
}

/// Copies between a standard stream of the caller and the pipe that the command has instead.
pub struct StreamCopy {
    name: &'static str,
    direction: CopyDirection,
    from: File,
    to: File,
}

/// Whether the bytes go to the command or come from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyDirection {
    ToCommand,
    FromCommand,
}

impl StreamCopy {
    pub fn direction(&self) -> CopyDirection {
        self.direction
    }

    /// Copies until the end of the stream. Blocks; runs in a thread of the proxy.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read or written. That the command does not read its input is no failure.
    pub fn run(mut self) -> anyhow::Result<()> {
        match io::copy(&mut self.from, &mut self.to) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            copied => copied.map(drop).with_context(|| format!("cannot copy {}", self.name)),
        }
    }
}

/// Decides how the caller's standard streams reach the command. Runs in the proxy, before the jail exists.
///
/// # Errors
///
/// Fails if a stream is a directory.
pub fn confine_stdio(view: &FilesystemView) -> anyhow::Result<(CommandStdio, Vec<StreamCopy>)> {
    let (input, output, error) = (io::stdin(), io::stdout(), io::stderr());
    let given = [
        ("standard input", input.as_fd()),
        ("standard output", output.as_fd()),
        ("standard error", error.as_fd()),
    ];
    let mut confined = Confined { view, copies: Vec::new(), outputs: Vec::new() };
    let mut streams = [const { CommandStream::Inherited }; 3];
    for (stream, (name, given)) in streams.iter_mut().zip(given) {
        *stream = confined.confine(name, given).with_context(|| format!("cannot pass {name} on"))?;
    }
    Ok((streams, confined.copies))
}

struct Confined<'a> {
    view: &'a FilesystemView,
    copies: Vec<StreamCopy>,
    /// The files that have a pipe already. Standard output and error to the same file share it, which keeps the order
    /// of what they write.
    outputs: Vec<(FileId, Arc<OwnedFd>)>,
}

impl Confined<'_> {
    fn confine(&mut self, name: &'static str, given: BorrowedFd<'_>) -> anyhow::Result<CommandStream> {
        let file = File::from(given.try_clone_to_owned()?);
        let metadata = file.metadata()?;
        let flags = OFlag::from_bits_retain(fcntl(given, FcntlArg::F_GETFL)?);
        if metadata.is_dir() || flags.contains(OFlag::O_PATH) {
            bail!("it is a directory, or not open for reading or writing");
        }
        let replaceable = metadata.is_file() || metadata.file_type().is_block_device();
        if !replaceable || flags & OFlag::O_ACCMODE == OFlag::O_RDWR {
            return Ok(CommandStream::Inherited);
        }
        let id = FileId::of(&metadata);
        let path = fs::read_link(format!("/proc/self/fd/{}", given.as_raw_fd())).ok();
        let path = path.filter(|path| FileId::at(path) == Some(id));
        if path.as_ref().is_some_and(|path| self.view.is_writable(path)) {
            return Ok(CommandStream::Inherited);
        }
        if flags & OFlag::O_ACCMODE == OFlag::O_WRONLY {
            return self.copy_output(name, id, file);
        }
        match path.filter(|path| metadata.is_file() && File::open(path).is_ok()) {
            Some(path) if given.as_raw_fd() == 0 => Ok(CommandStream::ReadOnly(path)),
            Some(_) | None => self.copy_input(name, file),
        }
    }

    fn copy_output(&mut self, name: &'static str, id: FileId, to: File) -> anyhow::Result<CommandStream> {
        if let Some((_, pipe)) = self.outputs.iter().find(|(known, _)| *known == id) {
            return Ok(CommandStream::Pipe(pipe.clone()));
        }
        let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        let pipe = Arc::new(write);
        self.outputs.push((id, pipe.clone()));
        let direction = CopyDirection::FromCommand;
        self.copies.push(StreamCopy { name, direction, from: read.into(), to });
        Ok(CommandStream::Pipe(pipe))
    }

    fn copy_input(&mut self, name: &'static str, from: File) -> anyhow::Result<CommandStream> {
        let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        let direction = CopyDirection::ToCommand;
        self.copies.push(StreamCopy { name, direction, from, to: write.into() });
        Ok(CommandStream::Pipe(Arc::new(read)))
    }
}

/// Device and inode of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileId(u64, u64);

impl FileId {
    fn of(metadata: &fs::Metadata) -> Self {
        FileId(metadata.dev(), metadata.ino())
    }

    fn at(path: &Path) -> Option<Self> {
        fs::symlink_metadata(path).ok().map(|metadata| Self::of(&metadata))
    }
}

/// Returns the file descriptors that must stay open until the command starts.
pub(super) fn descriptors(streams: &CommandStdio) -> Vec<RawFd> {
    let pipes = streams.iter().filter_map(|stream| match stream {
        CommandStream::Pipe(pipe) => Some(pipe.as_raw_fd()),
        CommandStream::Inherited | CommandStream::Null | CommandStream::ReadOnly(_) => None,
    });
    pipes.collect()
}

/// The command's standard input on a read-only mount, where it has one.
pub(super) struct ReadOnlyInput(Option<File>);

impl ReadOnlyInput {
    /// Opens the file again, where the caller's descriptor is. Runs in init, before the view is mounted.
    pub(super) fn open([input, ..]: &CommandStdio) -> anyhow::Result<Self> {
        let CommandStream::ReadOnly(path) = input else { return Ok(ReadOnlyInput(None)) };
        let opened = Self::reopen(path);
        let opened = opened.with_context(|| format!("cannot open standard input, {}, again", path.display()));
        opened.map(|file| ReadOnlyInput(Some(file)))
    }

    fn reopen(path: &Path) -> io::Result<File> {
        let tree = kernel::copy_tree(path)?;
        kernel::restrict_tree(tree.as_fd(), MountRestriction::Everything)?;
        let mut file = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(format!("/proc/self/fd/{}", tree.as_raw_fd()))?;
        let mut given = File::from(io::stdin().as_fd().try_clone_to_owned()?);
        if FileId::of(&file.metadata()?) != FileId::of(&given.metadata()?) {
            return Err(io::Error::other("another file has taken its place"));
        }
        file.seek(SeekFrom::Start(given.stream_position()?))?;
        Ok(file)
    }

    /// Moves the caller's offset to where the command has read, for whoever reads on. Runs in init.
    pub(super) fn give_offset_back(&self) {
        let Some(mut file) = self.0.as_ref() else { return };
        let given = io::stdin().as_fd().try_clone_to_owned();
        if let (Ok(offset), Ok(given)) = (file.stream_position(), given) {
            drop(File::from(given).seek(SeekFrom::Start(offset)));
        }
    }

    /// Sets the streams of the command. Runs in init.
    pub(super) fn set_stdio(
        &self,
        command: &mut Command,
        [input, output, error]: &CommandStdio,
    ) -> io::Result<()> {
        let input = match (&self.0, input) {
            (Some(file), _) => Some(file.try_clone()?.into()),
            (None, input) => to_stdio(input)?,
        };
        input.map(|input| command.stdin(input));
        to_stdio(output)?.map(|output| command.stdout(output));
        to_stdio(error)?.map(|error| command.stderr(error));
        Ok(())
    }
}

/// `None` if the stream is that of this process.
fn to_stdio(stream: &CommandStream) -> io::Result<Option<Stdio>> {
    Ok(match stream {
        CommandStream::Inherited => None,
        CommandStream::Null | CommandStream::ReadOnly(_) => Some(Stdio::null()),
        CommandStream::Pipe(pipe) => Some(pipe.try_clone()?.into()),
    })
}
