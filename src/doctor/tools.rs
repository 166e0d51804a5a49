//! The programs that installing plugins needs.

use std::process::Command;

use super::Problem;

/// A program that installing plugins needs.
pub struct Tool {
    pub name: &'static str,
    /// Its purpose.
    pub purpose: &'static str,
    /// Debian's package.
    pub package: &'static str,
    /// Its version, or why it cannot be run.
    pub found: Result<String, String>,
}

impl Tool {
    pub(super) fn find_all() -> Vec<Tool> {
        let tool = |name, purpose, package, command: &[&str]| Tool {
            name,
            purpose,
            package,
            found: first_line(command),
        };
        vec![
            tool(
                "python3",
                "download plugins",
                "python3",
                &["python3", "--version"],
            ),
            tool(
                "pip",
                "download plugins",
                "python3-pip",
                &["python3", "-m", "pip", "--version"],
            ),
            tool("g++", "build the cpu plugin", "g++", &["g++", "--version"]),
        ]
    }
}

fn first_line(command: &[&str]) -> Result<String, String> {
    let [program, arguments @ ..] = command else {
        return Err("no command".to_string());
    };
    let output = Command::new(program)
        .args(arguments)
        .output()
        .map_err(|e| e.to_string())?;
    let line = |bytes: &[u8], last: bool| {
        let text = String::from_utf8_lossy(bytes);
        let mut lines = text.lines().filter(|l| !l.trim().is_empty());
        let line = if last {
            lines.next_back()
        } else {
            lines.next()
        };
        line.unwrap_or_default().to_string()
    };
    if output.status.success() {
        Ok(line(&output.stdout, false))
    } else {
        Err(line(&output.stderr, true))
    }
}

/// Which tools are missing; they are needed where a plugin is still `to_install`.
pub(super) fn problem(tools: &[Tool], to_install: bool) -> Option<Problem> {
    let missing: Vec<&Tool> = tools.iter().filter(|t| t.found.is_err()).collect();
    if missing.is_empty() {
        return None;
    }
    let names: Vec<String> = missing
        .iter()
        .map(|t| format!("{} (to {})", t.name, t.purpose))
        .collect();
    let packages: Vec<&str> = missing.iter().map(|t| t.package).collect();
    Some(Problem {
        what: format!("missing: {}", names.join(", ")),
        remedy: format!(
            "run `sudo apt-get update && sudo apt-get install --yes {}`",
            packages.join(" ")
        ),
        needed: to_install,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_tools_are_named_with_one_command() {
        let tool = |name, package, found: Result<&str, &str>| Tool {
            name,
            purpose: "work",
            package,
            found: found.map(str::to_string).map_err(str::to_string),
        };
        let tools = [
            tool("python3", "python3", Ok("Python 3.12")),
            tool("pip", "python3-pip", Err("No module named pip")),
            tool("g++", "g++", Err("not found")),
        ];
        let found = problem(&tools, true).unwrap();
        assert_eq!(found.what, "missing: pip (to work), g++ (to work)");
        assert_eq!(
            found.remedy,
            "run `sudo apt-get update && sudo apt-get install --yes python3-pip g++`"
        );
        assert!(found.needed);
        assert!(problem(&tools[..1], true).is_none());
    }

    #[test]
    fn a_command_that_fails_tells_why() {
        assert!(first_line(&["maxdiff-no-such-program"]).is_err());
        let failed = first_line(&["sh", "-c", "echo first >&2; echo last >&2; exit 3"]);
        assert_eq!(failed, Err("last".to_string()));
        assert_eq!(
            first_line(&["sh", "-c", "echo one; echo two"]),
            Ok("one".to_string())
        );
    }
}
