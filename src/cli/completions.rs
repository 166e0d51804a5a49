//! `completions`: shell completion, of configuration keys and values too.
//!
//! The shell asks the program itself: it runs it with [`VARIABLE`] set to the shell's name.

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use clap::Args;
use clap_complete::Shell;
use clap_complete::engine::{
    ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter,
};
use clap_complete::env::{CompleteEnv, Shells};

use super::{CliError, print};
use crate::config::{self, RECIPES, Verb};

/// Set to a shell's name, it asks the program for the completions of the words after `--`.
pub const VARIABLE: &str = "MAXDIFF_COMPLETE";
/// The program's name, for which shells ask.
const PROGRAM: &str = "maxdiff-rs";

/// Bash takes `key=value` for three words. They are joined before the program is asked, and what is on the line already
/// is left out of its answers.
const BASH: &str = r#"
_maxdiff_rs() {
    if [[ $COMP_WORDBREAKS != *=* ]]; then
        _clap_complete_maxdiff_rs "$@"
        return
    fi
    local -a words=()
    local at last current=0
    for at in "${!COMP_WORDS[@]}"; do
        last=$(( ${#words[@]} - 1 ))
        if (( last > 0 )) && [[ ${COMP_WORDS[at]} == =* || ${COMP_WORDS[at-1]} == *= ]]; then
            words[last]+=${COMP_WORDS[at]}
        else
            words+=("${COMP_WORDS[at]}")
        fi
        (( at == COMP_CWORD )) && current=$(( ${#words[@]} - 1 ))
    done
    local word=${words[current]}
    local COMP_WORDS=("${words[@]}") COMP_CWORD=$current
    _clap_complete_maxdiff_rs "$1" "$word" "$3"
    [[ $word != *=* ]] || COMPREPLY=("${COMPREPLY[@]#"${word%=*}="}")
}
complete -o nospace -o bashdefault -o default -F _maxdiff_rs maxdiff-rs
"#;

/// `completions ...`
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Answers a shell that asks for completions, and ends the process then.
pub fn answer(command: impl Fn() -> clap::Command) {
    CompleteEnv::with_factory(command).var(VARIABLE).complete();
}

/// Runs `completions`.
///
/// # Errors
/// When the standard output cannot be written.
pub fn run(args: &CompletionsArgs) -> Result<ExitCode, CliError> {
    let name = args.shell.to_string();
    let shells = Shells::builtins();
    let shell = shells
        .completer(&name)
        .ok_or_else(|| CliError::Usage(format!("{name}: no completions for this shell")))?;
    let mut script = Vec::new();
    shell
        .write_registration(VARIABLE, PROGRAM, PROGRAM, &program(), &mut script)
        .map_err(CliError::failed)?;
    let mut script = String::from_utf8_lossy(&script).into_owned();
    if args.shell == Shell::Bash {
        script.push_str(BASH);
    }
    print(&script)?;
    Ok(ExitCode::SUCCESS)
}

/// How the shell calls this program: by its name if that finds it, otherwise by its path.
fn program() -> String {
    let called = std::env::args_os().next().unwrap_or_default();
    let by_name = Path::new(&called).components().count() == 1;
    match std::env::current_exe() {
        Ok(path) if !by_name => path.display().to_string(),
        _ => PROGRAM.to_owned(),
    }
}

/// Completes `KEY=VALUE`: keys that the verb of the command line reads, and their values where these are known.
pub fn overrides() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let words: Vec<String> = std::env::args().skip_while(|word| word != "--").collect();
        let is_said = |verb: &Verb| {
            // `module run` is two words.
            let name = verb.name().split(' ').next().unwrap_or_default();
            words.iter().any(|word| word == name)
        };
        let verb = Verb::ALL.into_iter().find(is_said);
        candidates(config::complete(&current.to_string_lossy(), verb))
    })
}

/// Completes a configuration: the names of recipes, and paths.
pub fn recipes() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let mut found = named_recipes(current);
        found.extend(PathCompleter::any().complete(current));
        found
    })
}

/// Completes the name of a recipe.
pub fn recipe_names() -> ArgValueCompleter {
    ArgValueCompleter::new(named_recipes)
}

fn named_recipes(current: &OsStr) -> Vec<CompletionCandidate> {
    let begun = current.to_string_lossy();
    let named = RECIPES.iter().filter(|r| r.name.starts_with(&*begun));
    let named = named.map(|recipe| (recipe.name.to_owned(), recipe.about().to_owned()));
    candidates(named.collect())
}

/// Completes the name of a key.
pub fn keys() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let current = current.to_string_lossy();
        let found = config::complete(current.trim_end_matches('='), None);
        let keys = found.into_iter().map(|(word, help)| {
            let key = word.trim_end_matches('=').to_owned();
            (key, help)
        });
        candidates(keys.collect())
    })
}

/// Completes the options of `convert`.
pub fn convert_options() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let current = current.to_string_lossy();
        let words = [
            "dtype=fp16",
            "dtype=bf16",
            "dtype=fp32",
            "parts=denoiser",
            "revision=",
        ];
        let words = words.iter().filter(|word| word.starts_with(&*current));
        words.map(CompletionCandidate::new).collect()
    })
}

fn candidates(words: Vec<(String, String)>) -> Vec<CompletionCandidate> {
    words
        .into_iter()
        .map(|(word, help)| CompletionCandidate::new(word).help(Some(help.into())))
        .collect()
}
