//! Problems of a policy or a configuration: location, line, caret, help. Printing them is the caller's part.

use std::fmt;

use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};
use rules::load::problem::Problem;
use serde_json::{Value, json};

use crate::report::terminal::{BAD, FAINT, GOOD, HEAD, WARN};

const STYLED: Renderer =
    Renderer::styled().error(BAD).warning(WARN).help(GOOD).emphasis(HEAD).line_num(FAINT).context(FAINT);

/// Severity of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiagnosticLevel {
    Error,
    Warning,
}

/// A policy or a configuration that does not compile. Displays its first problem in one line.
#[derive(Debug)]
pub struct InvalidPolicy {
    pub problems: Vec<Problem>,
}

impl fmt::Display for InvalidPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.problems.as_slice() {
            [] => f.write_str("no problem is known"),
            [first] => write!(f, "{first}"),
            [first, more @ ..] => write!(f, "{first} (and {} more)", more.len()),
        }
    }
}

impl std::error::Error for InvalidPolicy {}

/// Returns a problem as JSON.
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
    render_with(&STYLED, problem, severity)
}

/// Renders errors without colours, for logs and records.
pub(crate) fn render_plain(problems: &[Problem]) -> String {
    let plain =
        problems.iter().map(|problem| render_with(&Renderer::plain(), problem, DiagnosticLevel::Error));
    plain.collect::<Vec<_>>().join("\n")
}

fn render_with(renderer: &Renderer, problem: &Problem, severity: DiagnosticLevel) -> String {
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
    let snippet = Snippet::source(&line).path(&*at.file).line_start(at.line as usize).annotation(caret);
    let report = level.primary_title(problem.fault.to_string()).element(snippet);
    let help = problem.help.as_ref().map(|help| Level::HELP.message(help));
    renderer.render(&[report.elements(help)])
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

    fn problem(line: u32, column: u32, width: u32, excerpt: &str) -> Problem {
        let (file, excerpt) = ("p.toml".into(), excerpt.to_owned());
        let at = SourceLocation { file, line, column, width, excerpt };
        Problem { at, fault: ProblemKind::UnknownKey { key: "k".to_owned() }, help: None }
    }

    fn shown(line: u32, column: u32, width: u32, excerpt: &str, help: Option<&str>) -> String {
        let help = help.map(str::to_owned);
        render_plain(&[Problem { help, ..problem(line, column, width, excerpt) }])
    }

    #[test]
    fn an_error_tells_its_first_problem_and_how_many_follow() {
        for (count, wanted) in
            [(1, "p.toml:4:1: unknown key `k`"), (3, "p.toml:4:1: unknown key `k` (and 2 more)")]
        {
            let problems = vec![problem(4, 1, 1, "k = 1"); count];
            assert_eq!(InvalidPolicy { problems }.to_string(), wanted);
        }
    }

    #[test]
    fn carets_point_at_the_characters() {
        let head = "error: unknown key `k`";
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
