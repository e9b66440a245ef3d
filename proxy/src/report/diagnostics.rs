//! Problems of a policy, printed: place, line, caret, help.

use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};
use rules::load::problem::Problem;
use serde_json::{Value, json};

use crate::report::terminal::{BAD, FAINT, GOOD, HEAD, WARN};

const RENDERER: Renderer = Renderer::styled()
    .error(BAD)
    .warning(WARN)
    .help(GOOD)
    .emphasis(HEAD)
    .line_num(FAINT)
    .context(FAINT);

/// How bad a problem is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiagnosticLevel {
    Error,
    Warning,
}

/// Prints problems to stderr, as a compiler would.
pub fn print_problems(problems: &[Problem], severity: DiagnosticLevel) {
    for problem in problems {
        anstream::eprintln!("{}", render(problem, severity));
    }
}

/// The same for machines.
pub fn to_json(problem: &Problem, severity: DiagnosticLevel) -> Value {
    json!({
        "severity": severity.as_str(),
        "file": *problem.at.file,
        "line": problem.at.line,
        "column": problem.at.column,
        "width": problem.at.width,
        "message": problem.fault.to_string(),
        "help": problem.help,
    })
}

/// Renders a problem as a compiler would: message, location, line, caret, help. The text has colours.
pub fn render(problem: &Problem, severity: DiagnosticLevel) -> String {
    let at = &problem.at;
    let level = match severity {
        DiagnosticLevel::Error => Level::ERROR,
        DiagnosticLevel::Warning => Level::WARNING,
    };
    // The excerpt of a very long line ends before the problem: spaces keep the column right.
    let (column, width) = (at.column as usize - 1, at.width as usize);
    let line = format!("{:column$}", at.excerpt);
    let offset = |count| line.char_indices().nth(count).map_or(line.len(), |(offset, _)| offset);
    let caret = AnnotationKind::Primary.span(offset(column)..offset(column + width));
    let snippet =
        Snippet::source(&line).path(&*at.file).line_start(at.line as usize).annotation(caret);
    let report = level.primary_title(problem.fault.to_string()).element(snippet);
    let help = problem.help.as_ref().map(|help| Level::HELP.message(help));
    RENDERER.render(&[report.elements(help)])
}

impl DiagnosticLevel {
    fn as_str(self) -> &'static str {
        match self {
            DiagnosticLevel::Error => "error",
            DiagnosticLevel::Warning => "warning",
        }
    }
}

#[cfg(test)]
mod tests {
    use rules::load::problem::{ProblemKind, SourceLocation};

    use super::*;

    fn shown(line: u32, column: u32, width: u32, excerpt: &str, help: Option<&str>) -> String {
        let (file, excerpt) = ("p.toml".into(), excerpt.to_owned());
        let at = SourceLocation { file, line, column, width, excerpt };
        let fault = ProblemKind::UnknownKey { key: "k".to_owned() };
        let problem = Problem { at, fault, help: help.map(str::to_owned) };
        let text = render(&problem, DiagnosticLevel::Warning);
        anstream::adapter::strip_str(&text).to_string()
    }

    #[test]
    fn carets_point_at_the_characters() {
        let head = "warning: `k` is not a key here";
        for (text, wanted) in [
            (
                shown(4, 1, 1, "k = 1", Some("did you mean `l`?")),
                " --> p.toml:4:1\n  |\n4 | k = 1\n  | ^\n  |\n  = help: did you mean `l`?",
            ),
            (
                shown(12, 7, 3, "日本 = [\"x\"]", None), // each of the two is two columns wide
                "  --> p.toml:12:7\n   |\n12 | 日本 = [\"x\"]\n   |         ^^^",
            ),
            (shown(3, 5, 1, "last", None), " --> p.toml:3:5\n  |\n3 | last\n  |     ^"),
            (shown(1, 1, 1, "", None), " --> p.toml:1:1\n  |\n1 |\n  | ^"),
        ] {
            assert_eq!(text, format!("{head}\n{wanted}"));
        }
        let far = shown(1, 5000, 3, &"x".repeat(200), None);
        assert!(far.contains(" --> p.toml:1:5000\n") && far.contains('^'), "{far}");
    }
}
