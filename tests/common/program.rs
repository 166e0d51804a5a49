//! The program from the outside.

use std::ffi::OsStr;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// The program with these arguments and no standard input.
pub fn program<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_maxdiff-rs"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs the test `name`, with its module, in a process of its own, with `MAXDIFF_TEST_CHILD` set; `None` in that process.
pub fn in_child(name: &str, variables: &[(&str, &str)]) -> Option<Output> {
    in_child_all(&[name], variables)
}

/// The same with several tests, which all run in one process.
pub fn in_child_all(names: &[&str], variables: &[(&str, &str)]) -> Option<Output> {
    const CHILD: &str = "MAXDIFF_TEST_CHILD";
    if std::env::var_os(CHILD).is_some() {
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "--nocapture"]).args(names);
    command.envs(variables.iter().copied());
    Some(command.env(CHILD, "1").output().unwrap())
}

/// Fails where the one test of a child process has failed.
#[track_caller]
pub fn passed(output: &Output) {
    all_passed(output, 1);
}

/// Fails where one of the `count` tests of a child process has failed.
#[track_caller]
pub fn all_passed(output: &Output, count: usize) {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(
        output.status.success() && out.contains(&format!(" {count} passed")),
        "{out}{err}"
    );
}

/// Has a command compile its programs without LLVM's optimizations, with the older emitters, and in one part, since the
/// tests beside it take the other processors: a fifth of the time.
/// For tests of what training and generating do; what they compute is compared with the oracles where programs are
/// compiled as a user's are.
pub fn without_optimizations(command: &mut Command) -> &mut Command {
    let flags = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false \
                 --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1";
    command.env("XLA_FLAGS", flags)
}

/// What a program wrote.
pub fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// What a program that succeeded wrote with `--json`: the last value, before which `generate` has one for each image.
pub fn json(output: &Output) -> Value {
    assert!(
        output.status.success(),
        "{}\n{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    let values = serde_json::Deserializer::from_slice(&output.stdout).into_iter();
    values.last().unwrap().unwrap()
}
