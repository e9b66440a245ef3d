//! Terminals and job control: a shell, an editor and an interpreter inside, and the shell outside that sees one
//! job. A typist types, and waits for what must be seen.

use std::fs;

use serde_json::json;

use super::scene::{CommandResult, JailScene, RunAs};

/// Types steps into a shell of the caller's; what was on the screen.
fn type_steps(scene: &JailScene, steps: &[serde_json::Value]) -> String {
    let lines: Vec<String> = steps.iter().map(ToString::to_string).collect();
    let steps = scene.write_file("steps", &lines.join("\n"));
    let typist = scene.path("typist.py");
    fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/jail/typist.py"), &typist).unwrap();
    let ran = CommandResult::run(scene.outside_command("/usr/bin/python3").arg(typist).arg(steps));
    assert_eq!(ran.status.code(), Some(0), "{ran}");
    ran.out
}

fn type_run(scene: &JailScene, rest: &str) -> serde_json::Value {
    json!(["type", format!("{} -q -- {rest}\n", scene.run_arguments().join(" "))])
}

/// Waits until a process inside is in the foreground of a terminal, or is stopped.
fn wait_for_state(scene: &JailScene, letters: &str, program: &str) -> serde_json::Value {
    json!(["wait", format!("ps -u {} -o stat=,args= | grep -Eq '^{letters} +{program}'", scene.who.uid())])
}

#[test]
fn a_job_is_stopped_and_goes_on() {
    let scene = JailScene::new(RunAs::User);
    type_steps(
        &scene,
        &[
            json!(["see", "out> "]),
            type_run(&scene, "sleep 4321"),
            wait_for_state(&scene, "S[a-zA-Z<]*\\+", "sleep 4321"),
            json!(["type", "\u{1a}"]),
            json!(["see", "Stopped", "out> "]),
            wait_for_state(&scene, "T[a-zA-Z<]*", "sleep 4321"),
            json!(["type", "fg\n"]),
            wait_for_state(&scene, "S[a-zA-Z<]*\\+", "sleep 4321"),
            json!(["type", "\u{3}"]),
            json!(["see", "out> "]),
            json!(["type", "echo status=$?.\n"]),
            json!(["see", "status=130\\.", "out> "]),
        ],
    );
}

#[test]
fn a_pipeline_is_one_job() {
    let scene = JailScene::new(RunAs::User);
    let piped =
        |rest: &str| json!(["type", format!("{} -q -- {rest} | cat\n", scene.run_arguments().join(" "))]);
    type_steps(
        &scene,
        &[
            json!(["see", "out> "]),
            piped("sh -c 'echo one; echo two'"),
            json!(["see", "one\r\ntwo\r\n", "out> "]),
            // The group is shared with the proxy and `cat`: who is inside does not signal it.
            piped("sh -c 'kill -9 0; echo three'"),
            json!(["see", "three\r\n", "out> "]),
            piped("sleep 4322"),
            wait_for_state(&scene, "S[a-zA-Z<]*\\+", "sleep 4322"),
            json!(["type", "\u{1a}"]),
            json!(["see", "Stopped", "out> "]),
            json!(["type", "fg\n"]),
            wait_for_state(&scene, "S[a-zA-Z<]*\\+", "sleep 4322"),
            json!(["type", "\u{3}"]),
            json!(["see", "out> "]),
            json!(["type", "echo status=${PIPESTATUS[0]}.\n"]),
            json!(["see", "status=130\\.", "out> "]),
        ],
    );
}

#[test]
fn a_job_behind_the_others_waits_for_the_terminal() {
    let scene = JailScene::new(RunAs::User);
    let behind = json!(["type", format!("{} -q -- cat &\n", scene.run_arguments().join(" "))]);
    type_steps(
        &scene,
        &[
            json!(["see", "out> "]),
            behind,
            wait_for_state(&scene, "T[a-zA-Z<]*", "cat"),
            wait_for_state(&scene, "T[a-zA-Z<]*", "[^ ]*sandbar run"), // what the shell sees, a moment later
            json!(["type", "fg\n"]),
            wait_for_state(&scene, "S[a-zA-Z<]*\\+", "cat"),
            json!(["type", "typed\n"]),
            json!(["see", "typed\r\ntyped\r\n"]),
            json!(["type", "\u{4}"]),
            json!(["see", "out> "]),
        ],
    );
}

#[test]
fn a_shell_inside_has_jobs_of_its_own() {
    for who in RunAs::BOTH {
        let scene = JailScene::new(who);
        let screen = type_steps(
            &scene,
            &[
                json!(["see", "out> "]),
                type_run(&scene, "env PS1='in> ' bash --norc --noprofile -i"),
                json!(["see", "in> "]),
                json!(["type", "tty; stty rows 33 cols 111; stty size\n"]),
                json!(["see", "/dev/console", "33 111", "in> "]),
                json!(["type", "sleep 4323\n"]),
                wait_for_state(&scene, "S[a-zA-Z<]*\\+", "sleep 4323"),
                json!(["type", "\u{1a}"]),
                json!(["see", "Stopped", "in> "]),
                json!(["type", "kill %1; echo job=$(jobs | wc -l).; exit 3\n"]),
                json!(["see", "job=1\\.", "out> "]),
                json!(["type", "echo status=$?.; stty -a | grep -o -- '-echo ' ; echo seen.\n"]),
                json!(["see", "status=3\\.", "seen\\."]),
            ],
        );
        assert!(!screen.contains("no job control"), "{screen}");
    }
}

#[test]
fn an_editor_and_an_interpreter_work_and_lines_of_ours_wait() {
    let scene = JailScene::new(RunAs::User);
    // A command given to vim, not typed: what is typed while it starts may be lost.
    let job = "call job_start(['sh', '-c', 'curl -s https://denied.example/; touch asked'])";
    let vim = format!("{} -- vim -u NONE -c \"{job}\" file\n", scene.run_arguments().join(" "));
    let screen = type_steps(
        &scene,
        &[
            json!(["see", "out> "]),
            json!(["type", vim]),
            json!(["see", "New"]),
            json!(["wait", "test -e asked"]),
            json!(["type", "ihello\u{1b}:wq\r"]),
            json!(["see", "exit status 0", "out> "]),
            type_run(&scene, "/usr/bin/python3 -q"),
            json!(["see", ">>> "]),
            json!(["type", "6 * 7\n"]),
            json!(["see", "42", ">>> "]),
            json!(["type", "\u{4}"]),
            json!(["see", "out> "]),
        ],
    );
    assert_eq!(fs::read_to_string(scene.path("work/file")).unwrap(), "hello\n", "{screen}");
    // Curl was refused before anything was typed. What the editor says last may come before or after our line.
    let seen = |text: &str| screen.find(text).unwrap_or_else(|| panic!("no `{text}`: {screen}"));
    assert!(seen("hello") < seen("denied denied.example"), "{screen}");
    assert!(seen("denied denied.example") < seen("exit status 0"), "{screen}");
}

#[test]
fn nobody_types_into_the_callers_terminal() {
    let scene = JailScene::new(RunAs::User);
    let typing = "import fcntl, ctypes\nfor b in b'touch typed\\n':\n    try:\n        fcntl.ioctl(0, 0x5412, bytes([b]))\n        print('typed')\n    except OSError as e:\n        print('refused', e.errno)\n";
    scene.write_file("work/typing.py", typing);
    let screen = type_steps(
        &scene,
        &[
            json!(["see", "out> "]),
            type_run(&scene, "/usr/bin/python3 typing.py"),
            json!(["see", "refused 1\r\n", "out> "]),
            json!(["type", "echo done.\n"]),
            json!(["see", "done\\.\r\n", "out> "]),
        ],
    );
    assert!(!screen.contains("typed\r\n") && !scene.path("work/typed").exists(), "{screen}");
}
