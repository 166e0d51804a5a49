//! The program in a shell: completions, man pages, help.

use std::path::Path;
use std::process::{Command, Output, Stdio};

fn run(args: &[&str]) -> Output {
    let program = Path::new(env!("CARGO_BIN_EXE_maxdiff-rs"));
    let output = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output();
    output.unwrap()
}

fn stdout(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// What the program answers a shell that completes the last of these words.
fn completions(shell: &str, words: &[&str]) -> Vec<String> {
    let output = Command::new(env!("CARGO_BIN_EXE_maxdiff-rs"))
        .args(["--", "maxdiff-rs"])
        .args(words)
        .env("MAXDIFF_COMPLETE", shell)
        .env("_CLAP_COMPLETE_INDEX", words.len().to_string())
        .env("_CLAP_IFS", "\n")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    stdout(&output).lines().map(str::to_owned).collect()
}

/// What `scripts/release` packs, in a folder of its own and with nothing of this machine's environment.
#[test]
fn a_release_needs_nothing_of_the_checkout() {
    let folder = tempfile::tempdir().unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/release");
    let made = Command::new(script)
        .arg(env!("CARGO_BIN_EXE_maxdiff-rs"))
        .arg(folder.path())
        .output();
    let archive = stdout(&made.unwrap());
    let unpacked = Command::new("tar")
        .args([
            "--extract",
            "--strip-components=1",
            "--file",
            archive.trim(),
        ])
        .current_dir(folder.path())
        .status();
    assert!(unpacked.unwrap().success());
    for file in [
        "LICENSE",
        "NOTICE",
        "share/licenses/CRATES",
        "share/licenses/serde/LICENSE-MIT",
        "share/man/man1/maxdiff-rs-generate.1",
        "share/bash-completion/completions/maxdiff-rs",
    ] {
        assert!(folder.path().join(file).is_file(), "{file}");
    }
    let run = |words: &[&str]| {
        let mut command = Command::new(folder.path().join("bin/maxdiff-rs"));
        let command = command.args(words).env_clear().env("HOME", folder.path());
        stdout(&command.current_dir(folder.path()).output().unwrap())
    };
    let recipe = include_str!("../configs/base_xl.yml");
    assert_eq!(run(&["config", "show", "sdxl"]), recipe);
    assert!(run(&["config", "show"]).contains("sdxl-turbo"));
    assert!(run(&["lower", "quickstart", "--step=train", "--json"]).contains("\"ops\""));
}

#[test]
fn keys_and_values_are_completed() {
    let of = |words: &[&str]| completions("bash", words);
    assert_eq!(of(&["generate", "sdxl-t"]), ["sdxl-turbo"]);
    assert_eq!(of(&["config", "show", "emo"]), ["emoji"]);
    assert_eq!(of(&["gener"]), ["generate"]);
    assert_eq!(of(&["generate", "x.yml", "sched"]), ["scheduler="]);
    assert_eq!(
        of(&["generate", "x.yml", "scheduler=eu"]),
        ["scheduler=euler", "scheduler=euler_ancestral"]
    );
    let nested = "diffusion_scheduler_config.use_karras_sigmas";
    assert_eq!(
        of(&["generate", "x.yml", &nested[..40]]),
        [format!("{nested}=")]
    );
    assert_eq!(
        of(&["generate", "x.yml", &format!("{nested}=T")]),
        [format!("{nested}=True")]
    );
    // Each verb has keys of its own, and a key without effect is not offered.
    assert_eq!(
        of(&["train", "x.yml", "max_train_s"]),
        ["max_train_steps=", "max_train_samples="]
    );
    assert_eq!(of(&["generate", "x.yml", "max_train_s"]), [""; 0]);
    assert_eq!(of(&["train", "x.yml", "enable_prof"]), [""; 0]);
    assert_eq!(
        of(&["module", "run", "d", "quantization=i"]),
        [
            "quantization=int8",
            "quantization=int8_w8a16",
            "quantization=int8_w8a8_static"
        ]
    );
    assert_eq!(of(&["config", "explain", "guidance_s"]), ["guidance_scale"]);
    assert_eq!(of(&["convert", "a", "b", "dtype=b"]), ["dtype=bf16"]);
    let fish = completions("fish", &["generate", "x.yml", "num_inf"]);
    assert_eq!(fish, ["num_inference_steps=\tDenoising steps."]);
}

#[test]
fn every_shell_has_a_script_and_bash_joins_words() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = stdout(&run(&["completions", shell]));
        assert!(script.contains("MAXDIFF_COMPLETE"), "{shell}");
        assert!(script.contains(env!("CARGO_BIN_EXE_maxdiff-rs")), "{shell}");
    }
    assert_eq!(run(&["completions", "csh"]).status.code(), Some(2));
    // `scheduler=eu` is three words for bash.
    let test = r#"
        eval "$("$0" completions bash)"
        COMP_WORDBREAKS=' ='
        COMP_WORDS=(maxdiff-rs generate x.yml seed = 3 scheduler = eu)
        COMP_CWORD=8
        _maxdiff_rs maxdiff-rs eu =
        echo "${COMPREPLY[@]}"
        COMP_WORDS=(maxdiff-rs generate x.yml quantization =)
        COMP_CWORD=4
        _maxdiff_rs maxdiff-rs '' quantization
        echo "${COMPREPLY[@]}"
        COMP_WORDBREAKS=' '
        COMP_WORDS=(maxdiff-rs generate x.yml scheduler=eu)
        COMP_CWORD=3
        _maxdiff_rs maxdiff-rs scheduler=eu x.yml
        echo "${COMPREPLY[@]}""#;
    let output = Command::new("bash")
        .args(["--norc", "-c", test, env!("CARGO_BIN_EXE_maxdiff-rs")])
        .output();
    let Ok(output) = output else {
        return; // no bash here
    };
    assert_eq!(
        stdout(&output),
        "euler euler_ancestral\nint8 int8_w8a16 w4a16 fp8 fp8_full fp8_w8a16 nf4 mxfp4 mxfp6_e2m3 mxfp6_e3m2 mxfp8 nvfp4 int8_w8a8_static fp8_w8a8_static svdquant_w4a16 w4a4 svdquant_w4a4\nscheduler=euler scheduler=euler_ancestral\n",
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// The verbs that the help lists, as words.
fn verbs() -> Vec<Vec<String>> {
    let below = |words: &[&str]| -> Vec<String> {
        let help = stdout(&run(&[words, &["--help"]].concat()));
        let Some((_, list)) = help.split_once("Commands:\n") else {
            return Vec::new();
        };
        let lines = list.lines().take_while(|line| !line.is_empty());
        let names = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
        let names = names.filter_map(|line| line.split_whitespace().next());
        names
            .filter(|name| *name != "help")
            .map(str::to_owned)
            .collect()
    };
    let mut verbs = Vec::new();
    for verb in below(&[]) {
        let inner = below(&[&verb]);
        let inner = inner.into_iter().map(|name| vec![verb.clone(), name]);
        verbs.push(vec![verb.clone()]);
        verbs.extend(inner);
    }
    verbs
}

#[test]
fn every_verb_has_a_page_and_nothing_is_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let pages = dir.path().join("man/man1");
    let folder = pages.to_str().unwrap();
    let written = stdout(&run(&["man", folder]));
    let verbs = verbs();
    assert!(verbs.len() > 12, "{verbs:?}");
    assert_eq!(written.lines().count(), 1 + verbs.len(), "{written}");
    for verb in &verbs {
        let name = format!("maxdiff-rs-{}.1", verb.join("-"));
        let page = std::fs::read_to_string(pages.join(&name)).unwrap();
        assert!(page.contains(".SH SYNOPSIS"), "{name}");
        let words: Vec<&str> = verb.iter().map(String::as_str).collect();
        let help = stdout(&run(&[&words[..], &["--help"]].concat()));
        for (heading, title) in [
            ("\nExit codes:\n", ".SH \"EXIT CODES\""),
            ("Examples:\n", ".SH EXAMPLES"),
        ] {
            assert_eq!(
                help.contains(heading),
                page.contains(title),
                "{name}: {heading}"
            );
        }
        let lines = help.lines().map(str::len);
        assert!(lines.max().unwrap_or(0) <= 100, "{name}");
    }

    let page = pages.join("maxdiff-rs-train.1");
    std::fs::write(&page, "mine").unwrap();
    std::fs::remove_file(pages.join("maxdiff-rs.1")).unwrap();
    let again = run(&["man", folder]);
    assert_eq!(again.status.code(), Some(2));
    let error = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(error.contains("exists already; --replace"), "{error}");
    assert_eq!(std::fs::read_to_string(&page).unwrap(), "mine");
    assert!(!pages.join("maxdiff-rs.1").exists(), "none is written then");
    stdout(&run(&["man", folder, "--replace"]));
    assert!(std::fs::read_to_string(&page).unwrap().contains(".TH"));

    let all = stdout(&run(&["man"]));
    assert_eq!(all.matches("\n.TH ").count(), 1 + verbs.len());
}
