//! `doctor` and `plugin` from the outside.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{
    cpu_plugin, golden, in_child, json, kernels_run, passed, program, text, without_optimizations,
};
use crate::module_run::Inputs;
use maxdiff::pjrt::{ISA, UNUSABLE_ISAS, USABLE_ISAS};
use serde_json::Value;

#[test]
fn doctor_finds_the_installed_plugins() {
    cpu_plugin();
    let output = program(["doctor", "--json"]).output().unwrap();
    let report = json(&output);
    assert_eq!(report["ok"], true);
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["plugins"][0]["kind"], "cpu");
    assert_eq!(report["plugins"][0]["error"], Value::Null);
    let version = report["plugins"][0]["api_version"].as_str().unwrap();
    assert!(version.starts_with("0."), "{version}");
    assert_eq!(
        report["plugins"][0]["devices"],
        serde_json::json!(["cpu 0"])
    );
    let kernels = serde_json::to_value(cpu_plugin().kernels()).unwrap();
    assert_eq!(report["plugins"][0]["kernels"], kernels);
    let text = program(["doctor"]).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    let expected = match kernels_run() {
        true => "kernels: maxdiff.contract maxdiff.attention ",
        false => "kernels: none, ",
    };
    assert!(text.contains(expected), "{text}");
}

#[test]
fn an_instruction_set_that_cannot_be_had_is_refused() {
    let problem = |isa: &str| {
        let mut command = program(["doctor", "--json"]);
        let output = command.env("MAXDIFF_CPU_ISA", isa).output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let problems = report["problems"].as_array().unwrap();
        let about = |problem: &&Value| problem["remedy"].to_string().contains("MAXDIFF_CPU_ISA");
        problems
            .iter()
            .find(about)
            .map(|problem| problem["what"].to_string())
    };
    let (usable, unusable) = (attribute(USABLE_ISAS), attribute(UNUSABLE_ISAS));
    let names = |list: &str| -> Vec<String> {
        let names = list.split(',').filter(|name| !name.is_empty());
        names.map(str::to_string).collect()
    };
    let unknown = problem("avx9").unwrap();
    assert!(
        unknown.contains("MAXDIFF_CPU_ISA is 'avx9', expected emulated_avx2, "),
        "{unknown}"
    );
    for name in [names(&usable), names(&unusable)].concat() {
        assert!(unknown.contains(&name), "{name} is not in {unknown}");
    }
    if unusable.is_empty() {
        println!("not run: an instruction set that this machine lacks");
    }
    for name in names(&unusable) {
        let refused = problem(&name).unwrap();
        let expected = format!("MAXDIFF_CPU_ISA is {name}, but this machine has at most ");
        assert!(refused.contains(&expected), "{refused}");
    }
}

/// `doctor` names the set that is forced, as it does the one that is chosen.
#[test]
fn doctor_prints_the_instruction_set() {
    let printed = |command: &mut Command| {
        let output = command.output().unwrap();
        let report = text(&output.stdout).to_string();
        let line = report
            .lines()
            .find_map(|line| line.trim().strip_prefix("instruction set: "));
        line.unwrap_or_else(|| panic!("{report}")).to_string()
    };
    if !kernels_run() {
        return;
    }
    let used = attribute(ISA);
    assert_eq!(printed(&mut program(["doctor"])), used);
    for isa in ["avx2", "emulated_avx2"] {
        let mut command = program(["doctor"]);
        assert_eq!(printed(command.env("MAXDIFF_CPU_ISA", isa)), isa);
    }
}

/// Linux refuses tiles to a process that has a signal stack too small for their state, as one has here before `main`.
#[test]
fn tiles_that_the_system_refuses_are_done_without() {
    let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    if !(processor.contains("amx_bf16") && processor.contains("amx_int8")) {
        return println!("not run: amx, which this machine lacks");
    }
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("stack.so");
    small_signal_stack(&library);
    let name = "plugin::tiles_that_the_system_refuses_are_done_without";
    let preload = ("LD_PRELOAD", library.to_str().unwrap());
    let Some(output) = in_child(name, &[preload, ("MAXDIFF_CPU_ISA", "")]) else {
        return assert_eq!(attribute(ISA), "avx512");
    };
    passed(&output);
    let refusal = "the operating system refuses the tiles of amx";
    let told = text(&output.stderr);
    assert!(
        told.contains(&format!("warning: {refusal}")) && told.contains("so the kernels use avx512"),
        "{told}"
    );
    let mut doctor = program(["doctor"]);
    doctor
        .env("LD_PRELOAD", &library)
        .env("MAXDIFF_CPU_ISA", "amx");
    let output = doctor.output().unwrap();
    let report = text(&output.stdout);
    let expected = "MAXDIFF_CPU_ISA is amx, but this machine has at most avx512: ";
    assert!(report.contains(&format!("{expected}{refusal}")), "{report}");
}

/// A library that gives a process a small signal stack before `main`.
fn small_signal_stack(library: &Path) {
    let source = library.with_extension("cc");
    let code = "#include <signal.h>\n\
        __attribute__((constructor)) static void Shrink() {\n\
          static char memory[4096];\n\
          stack_t stack = {};\n\
          stack.ss_sp = memory;\n\
          stack.ss_size = sizeof(memory);\n\
          sigaltstack(&stack, nullptr);\n\
        }\n";
    std::fs::write(&source, code).unwrap();
    let mut compiler = Command::new("g++");
    compiler.args(["-shared", "-fPIC", "-o"]);
    let status = compiler.arg(library).arg(&source).status().unwrap();
    assert!(status.success());
}

/// The CPU plugin's attribute of this name.
fn attribute(name: &str) -> String {
    cpu_plugin().attributes()[name].to_string()
}

#[test]
fn the_number_of_threads_is_that_which_the_process_may_use_or_the_variables() {
    let threads = |command: &mut Command| {
        let report = json(&command.stdin(Stdio::null()).output().unwrap());
        report["processor"]["threads"].as_u64().unwrap()
    };
    let own = env!("CARGO_BIN_EXE_maxdiff-rs");
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let allowed = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let one = allowed.unwrap().trim().split([',', '-']).next().unwrap();
    let mut bound = Command::new("taskset");
    bound.args(["--cpu-list", one, own, "doctor", "--json"]);
    bound.env_remove("MAXDIFF_CPU_THREADS");
    assert_eq!(threads(&mut bound), 1);
    let set = |value| {
        let mut command = program(["doctor", "--json"]);
        command.env("MAXDIFF_CPU_THREADS", value);
        command
    };
    assert_eq!(threads(&mut set("3")), 3);
    let output = set("none").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let problem = report["problems"]
        .as_array()
        .unwrap()
        .iter()
        .find(|problem| {
            problem["what"]
                == "MAXDIFF_CPU_THREADS is 'none', expected a whole number from 1 to 1024"
        });
    assert_eq!(
        problem.unwrap()["remedy"],
        "set MAXDIFF_CPU_THREADS to a number of threads, or unset it"
    );
}

#[test]
fn without_a_plugin_doctor_fails_and_names_the_command() {
    let folder = tempfile::tempdir().unwrap();
    let output = program(["doctor"])
        .env("MAXDIFF_PLUGIN_DIR", folder.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let report = text(&output.stdout);
    assert!(
        report.contains(
            "wrong: the cpu plugin is not installed; run `maxdiff-rs plugin install cpu`"
        ),
        "{report}"
    );
}

/// Libraries that are plugins by their looks: doctor says what came of loading one, and goes on.
#[test]
fn doctor_outlives_a_plugin_that_does_not_load() {
    let own = maxdiff::pjrt::install::locate(maxdiff::pjrt::install::PluginKind::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("broken.so");
    let mut bytes = b"\x7fELF".to_vec();
    bytes.extend_from_slice(b" GetPjrtApi\0");
    std::fs::write(&broken, bytes).unwrap();
    let plugin = |kind: &str, library: &Path| {
        let output = program(["plugin", "install", kind, "--json", "--path"])
            .arg(library)
            .env("MAXDIFF_PLUGIN_DIR", folder.path())
            .output()
            .unwrap();
        json(&output);
    };
    plugin("cpu", &own.library);
    plugin("tpu", &broken);
    let output = program(["doctor", "--json"])
        .env("MAXDIFF_PLUGIN_DIR", folder.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["plugins"][0]["error"], Value::Null);
    let error = report["plugins"][1]["error"].as_str().unwrap();
    assert!(error.contains("broken.so"), "{error}");
    let problem = &report["problems"][0];
    assert_eq!(problem["remedy"], "run `maxdiff-rs plugin install tpu`");
}

/// The same library with instructions that no processor has: its process ends, the program's does not.
#[test]
fn a_plugin_that_ends_its_process_is_refused() {
    cpu_plugin();
    let own = maxdiff::pjrt::install::locate(maxdiff::pjrt::install::PluginKind::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut bytes = std::fs::read(&own.library).unwrap();
    for part in executable_parts(&bytes) {
        bytes[part].fill(0xff);
    }
    link_members(&own.library, folder.path());
    let library = folder.path().join("own.so");
    std::fs::write(&library, bytes).unwrap();
    let run = |args: &[&str]| {
        let mut command = program(args);
        command.env("MAXDIFF_PLUGIN_DIR", folder.path().join("plugins"));
        command.output().unwrap()
    };
    let path = library.to_str().unwrap();
    let installed = run(&["plugin", "install", "cpu", "--path", path]);
    assert!(installed.status.success(), "{}", text(&installed.stderr));
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny.yml");
    let bundle = folder.path().join("bundle");
    let output = run(&[
        "compile",
        recipe.to_str().unwrap(),
        "hardware=cpu",
        "--output",
        bundle.to_str().unwrap(),
    ]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("ends the process that loads it"), "{error}");
    let remedy = format!("run `maxdiff-rs plugin install cpu --path {path}`");
    assert!(error.contains(&remedy), "{error}");
}

/// Links the libraries that an installed plugin needs into `folder`, and gives its manifest.
fn link_members(library: &Path, folder: &Path) -> Value {
    let own = library.parent().unwrap();
    let manifest = std::fs::read_to_string(own.join("manifest.json")).unwrap();
    let manifest: Value = serde_json::from_str(&manifest).unwrap();
    for name in manifest["members"].as_object().unwrap().keys() {
        std::os::unix::fs::symlink(own.join(name), folder.join(name)).unwrap();
    }
    manifest
}

/// The places in an ELF file that are mapped as code, by its program headers.
fn executable_parts(elf: &[u8]) -> Vec<std::ops::Range<usize>> {
    let number = |at: usize, bytes: usize| {
        let digits = elf[at..at + bytes].iter().rev();
        digits.fold(0, |number, byte| (number << 8) | usize::from(*byte))
    };
    let [headers, size, count] = [number(32, 8), number(54, 2), number(56, 2)];
    let headers = (0..count).map(|index| headers + index * size);
    // PT_LOAD with PF_X.
    let code = headers.filter(|at| number(*at, 4) == 1 && number(at + 4, 4) & 1 == 1);
    code.map(|at| number(at + 8, 8)..number(at + 8, 8) + number(at + 32, 8))
        .collect()
}

/// A plugin of one's own is used where it lies, and the pinned one comes back.
#[test]
fn plugins_are_listed_and_taken_by_path() {
    cpu_plugin();
    let own = maxdiff::pjrt::install::locate(maxdiff::pjrt::install::PluginKind::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let plugin = |args: &[&str]| {
        program(["plugin"])
            .args(args)
            .env("MAXDIFF_PLUGIN_DIR", folder.path())
            .output()
            .unwrap()
    };
    assert_eq!(
        json(&plugin(&["list", "--json"]))["plugins"],
        serde_json::json!([])
    );
    let library = own.library.to_str().unwrap();
    let installed = json(&plugin(&["install", "cpu", "--path", library, "--json"]));
    assert_eq!(installed["version"], "local");
    assert_eq!(installed["library"], library);
    assert_eq!(installed["problem"], Value::Null);
    let listed = json(&plugin(&["list", "--json"]));
    assert_eq!(listed["plugins"], serde_json::json!([installed]));
    let list = plugin(&["list"]);
    assert!(text(&list.stdout).contains("tpu    not installed; `maxdiff-rs plugin install tpu`"));

    let missing = plugin(&["install", "cpu", "--path", "/nowhere/plugin.so"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stderr).contains("/nowhere/plugin.so"));
    assert_eq!(plugin(&["install", "gpu"]).status.code(), Some(2));
    let quiet = plugin(&["install", "cpu", "--path", library, "--quiet"]);
    assert!(quiet.status.success());
    assert_eq!(text(&quiet.stderr), "");
}

/// What runs before every build of other things must not download, nor write where it may not.
#[test]
fn a_plugin_that_is_in_use_is_installed_only_if_needed() {
    cpu_plugin();
    let own = maxdiff::pjrt::install::locate(maxdiff::pjrt::install::PluginKind::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("own.so");
    std::fs::copy(&own.library, &library).unwrap();
    let plugins = folder.path().join("plugins");
    let run = |args: &[&str]| {
        let mut command = program(args);
        // No python3 is found, so nothing is downloaded.
        command.env("MAXDIFF_PLUGIN_DIR", &plugins).env("PATH", "");
        command.output().unwrap()
    };
    let if_needed = ["plugin", "install", "cpu", "--if-needed"];
    let path = library.to_str().unwrap();
    let absent = run(&if_needed);
    assert_eq!(absent.status.code(), Some(1));
    let error = text(&absent.stderr);
    assert!(error.contains("python3 with pip is needed"), "{error}");

    let given = run(&["plugin", "install", "cpu", "--path", path]);
    assert!(given.status.success(), "{}", text(&given.stderr));
    std::fs::remove_file(plugins.join(".cpu.lock")).unwrap();
    let again = run(&if_needed);
    assert!(again.status.success(), "{}", text(&again.stderr));
    assert_eq!(text(&again.stdout).trim_end(), path);
    let said = format!("the cpu plugin local is in use: {path}");
    assert_eq!(text(&again.stderr).trim_end(), said);
    assert!(!plugins.join(".cpu.lock").exists(), "a lock was taken");
    let both = run(&["plugin", "install", "cpu", "--if-needed", "--path", path]);
    assert_eq!(both.status.code(), Some(2));

    // One that has changed is not complete. The remedy keeps it.
    let mut bytes = std::fs::read(&library).unwrap();
    bytes.push(0);
    std::fs::write(&library, bytes).unwrap();
    assert_eq!(run(&if_needed).status.code(), Some(1));
    let report = run(&["doctor", "--json"]);
    assert_eq!(report.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&report.stdout).unwrap();
    let problem = &report["problems"][0];
    assert_eq!(
        problem["remedy"],
        format!("run `maxdiff-rs plugin install cpu --path {path}`"),
        "{problem}"
    );
}

/// A program that was updated runs on the plugin of before, and says so; `--if-needed` builds the new one.
#[test]
fn a_stale_plugin_is_used_with_a_warning() {
    cpu_plugin();
    let own = maxdiff::pjrt::install::locate(maxdiff::pjrt::install::PluginKind::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let plugin = folder
        .path()
        .join(format!("cpu-{}", own.kind.pinned_version()));
    std::fs::create_dir(&plugin).unwrap();
    // The same library, but for the hash of its sources that it carries, beside the libraries that it needs.
    let listed = link_members(&own.library, &plugin);
    let hash = listed["sources_sha256"].as_str().unwrap().as_bytes();
    let mut bytes = std::fs::read(&own.library).unwrap();
    let places: Vec<usize> = bytes
        .windows(hash.len())
        .enumerate()
        .filter(|(_, window)| *window == hash)
        .map(|(at, _)| at)
        .collect();
    assert!(
        !places.is_empty(),
        "the library carries the hash of its sources"
    );
    for at in places {
        bytes[at..at + hash.len()].fill(b'0');
    }
    let library = plugin.join(own.library.file_name().unwrap());
    std::fs::write(&library, &bytes).unwrap();
    let manifest = serde_json::json!({
        "kind": "cpu",
        "version": own.kind.pinned_version(),
        "library": library,
        "sha256": maxdiff::util::hash::Sha256::of(&bytes).to_string(),
        "size": bytes.len(),
        "source": own.source,
        "sources_sha256": "00",
    });
    std::fs::write(plugin.join("manifest.json"), manifest.to_string()).unwrap();
    let inputs = Inputs::sd15().write(folder.path());
    let mut command = program(["module", "run", "--quiet"]);
    let output = without_optimizations(&mut command)
        .env("MAXDIFF_PLUGIN_DIR", folder.path())
        .arg(golden("unet_sd15"))
        .args(["hardware=cpu", "jax_cache_dir="])
        .arg("--inputs")
        .arg(&inputs)
        .arg("--outputs")
        .arg(folder.path().join("out.safetensors"))
        .output()
        .unwrap();
    let told = text(&output.stderr);
    assert!(output.status.success(), "{told}");
    assert_eq!(
        told,
        "warning: the cpu plugin was built from other sources than this program's, so its kernels are not used; run \
         `maxdiff-rs plugin install cpu`\n"
    );
    let output = program(["plugin", "install", "cpu", "--if-needed"])
        .env("MAXDIFF_PLUGIN_DIR", folder.path())
        .env("PATH", "")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    assert!(error.contains("python3 with pip is needed"), "{error}");
}

#[test]
fn paths_that_are_no_unicode_are_shown_all_the_same() {
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    let strange = folder.path().join(std::ffi::OsStr::from_bytes(b"f\xff"));
    for (args, pointer, code) in [
        (&["plugin", "list", "--json"][..], "/folder", 0),
        (&["doctor", "--json"][..], "/plugin_folder/path", 1),
    ] {
        let mut command = program(args);
        let output = command.env("MAXDIFF_PLUGIN_DIR", &strange).output();
        let output = output.unwrap();
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let shown = report.pointer(pointer).and_then(Value::as_str).unwrap();
        assert!(shown.ends_with("f\u{fffd}"), "{shown}");
    }
}
