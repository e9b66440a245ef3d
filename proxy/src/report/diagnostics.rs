//! Problems of a policy, printed: place, line, caret, help.

use rules::load::problem::Problem;
use serde_json::{Value, json};

use crate::report::terminal::{BAD, FAINT, GOOD, HEAD, WARN, paint};

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

pub fn render(problem: &Problem, severity: DiagnosticLevel) -> String {
    let at = &problem.at;
    let style = match severity {
        DiagnosticLevel::Error => BAD,
        DiagnosticLevel::Warning => WARN,
    };
    let number = at.line.to_string();
    let gutter = " ".repeat(number.len());
    let bar = paint(FAINT, "|");
    let caret = " ".repeat(at.column as usize - 1) + &"^".repeat(at.width as usize);
    let mut text = format!(
        "{}: {}\n{gutter}{} {at}\n{gutter} {bar}\n{} {bar} {}\n{gutter} {bar} {}",
        paint(style, severity.as_str()),
        paint(HEAD, &problem.fault),
        paint(FAINT, "-->"),
        paint(FAINT, number),
        at.excerpt,
        paint(style, caret),
    );
    if let Some(help) = &problem.help {
        text += &format!("\n{gutter} {} {}", paint(FAINT, "= help:"), paint(GOOD, help));
    }
    text
}

impl DiagnosticLevel {
    fn as_str(self) -> &'static str {
        match self {
            DiagnosticLevel::Error => "error",
            DiagnosticLevel::Warning => "warning",
        }
    }
}
