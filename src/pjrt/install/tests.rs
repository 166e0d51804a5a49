use std::cell::Cell;
use std::fs::File;
use std::io::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use tempfile::TempDir;
use zip::ZipWriter;
use zip::write::SimpleFileOptions;

use super::build::SOURCES;
use super::check::locate_checked_in;
use super::recipe::{Member, Wheel};
use super::*;

const LIBRARY: &[u8] = b"\x7fELF, and somewhere inside it GetPjrtApi\0 is named";

/// A wheel with the given entries.
fn wheel_file(path: &Path, entries: &[(&str, &[u8])]) {
    let mut writer = ZipWriter::new(File::create(path).unwrap());
    for (name, bytes) in entries {
        writer
            .start_file(*name, SimpleFileOptions::default())
            .unwrap();
        writer.write_all(bytes).unwrap();
    }
    writer.finish().unwrap();
}

/// A stand-in for `python3 -m pip`: answers `--version`, and copies `wheel` to the folder that
/// follows `--dest`, noting each download in `downloads`.
fn fake_python(dir: &Path, wheel: &Path) -> Tools {
    let script = dir.join("python3");
    let text = format!(
        "#!/bin/sh\nwhile [ $# -gt 0 ]; do\n  case $1 in\n    --version) exit 0 ;;\n    --dest) dest=$2 ;;\n  esac\n  shift\ndone\n\
         mkdir -p \"$dest\"\necho x >> '{}'\ncp '{}' \"$dest/w.whl\"\n",
        dir.join("downloads").display(),
        wheel.display()
    );
    fs::write(&script, text).unwrap();
    set_executable(&script);
    Tools {
        python: script,
        compiler: "/no/such/compiler".into(),
    }
}

fn set_executable(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

const LIBRARY_MEMBER: Member = Member {
    from: "lib/p.so",
    to: "p.so",
};

/// A recipe for one wheel with `lib/p.so`.
fn recipe(sha256: String) -> &'static Recipe {
    recipe_of(sha256, &[LIBRARY_MEMBER])
}

/// A recipe for one wheel with these members; tests leak it, as the real table is static.
fn recipe_of(sha256: String, members: &'static [Member]) -> &'static Recipe {
    let wheels = Box::leak(Box::new([Wheel {
        name: "some-plugin",
        version: "0.0.51",
        platform: "any",
        sha256: Box::leak(sha256.into_boxed_str()),
        size: 1,
        members,
    }]));
    Box::leak(Box::new(Recipe {
        kind: PluginKind::Tpu,
        arch: "x86_64",
        needs_gpu: false,
        version: PluginKind::Tpu.pinned_version(),
        library: "p.so",
        cuda_data_dir: None,
        wheels,
        compiled: false,
        disk: 1,
    }))
}

/// A script may not be run while a child of another test still has it open for writing, so tests
/// that write and run one take turns.
static TURN: Mutex<()> = Mutex::new(());

struct Fixture {
    _turn: MutexGuard<'static, ()>,
    dir: TempDir,
    tools: Tools,
    recipe: &'static Recipe,
}

impl Fixture {
    fn new(entries: &[(&str, &[u8])]) -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let dir = TempDir::new().unwrap();
        let wheel = dir.path().join("source.whl");
        wheel_file(&wheel, entries);
        let sum = sha256_of_file(&wheel).unwrap();
        let tools = fake_python(dir.path(), &wheel);
        Self {
            _turn: turn,
            tools,
            recipe: recipe(sum),
            dir,
        }
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("plugins")
    }

    fn install(&self) -> (Result<Installed>, Vec<String>) {
        let mut lines = Vec::new();
        let result = install_pinned(&self.root(), self.recipe, &self.tools, &mut |line| {
            lines.push(line.to_owned());
        });
        (result, lines)
    }

    fn downloads(&self) -> usize {
        fs::read_to_string(self.dir.path().join("downloads")).map_or(0, |text| text.lines().count())
    }

    /// Names in the plugin directory, without the lock file, which stays.
    fn left(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(self.root())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| !name.ends_with(".lock"))
            .collect();
        names.sort();
        names
    }
}

#[test]
fn installs_once_and_says_so_the_second_time() {
    let fixture = Fixture::new(&[("lib/p.so", LIBRARY), ("lib/other", b"left out")]);
    let (first, lines) = fixture.install();
    let first = first.unwrap();
    assert!(
        lines
            .last()
            .unwrap()
            .starts_with("installed the tpu plugin")
    );
    assert_eq!(fs::read(&first.library).unwrap(), LIBRARY);
    assert_eq!(first.version, "0.0.51");
    assert!(!first.stale);
    assert_eq!(locate_in(&fixture.root(), PluginKind::Tpu).unwrap(), first);
    assert_eq!(list_in(&fixture.root()).unwrap(), vec![first.clone()]);

    let (second, lines) = fixture.install();
    assert_eq!(second.unwrap(), first);
    assert!(lines[0].contains("already installed"), "{lines:?}");
    assert_eq!(fixture.downloads(), 1);
    assert_eq!(fixture.left(), ["tpu-0.0.51"]);
}

#[test]
fn replaces_a_damaged_installation() {
    const NEEDED: Member = Member {
        from: "lib/needed.so",
        to: "inside/needed.so",
    };
    let needed: &[u8] = b"what p.so is linked with";
    let mut fixture = Fixture::new(&[(LIBRARY_MEMBER.from, LIBRARY), (NEEDED.from, needed)]);
    let sum = fixture.recipe.wheels[0].sha256.to_owned();
    fixture.recipe = recipe_of(sum, &[LIBRARY_MEMBER, NEEDED]);
    let plugin = fixture.install().0.unwrap();
    let folder = plugin.library.parent().unwrap();
    for (file, bytes, downloads) in [(LIBRARY_MEMBER.to, LIBRARY, 2), (NEEDED.to, needed, 3)] {
        let file = folder.join(file);
        fs::write(&file, b"cut short").unwrap();
        let error = locate_in(&fixture.root(), PluginKind::Tpu).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(file.to_str().unwrap()), "{text}");
        assert!(
            text.contains("run `maxdiff-rs plugin install tpu`"),
            "{text}"
        );
        assert_eq!(fixture.install().0.unwrap(), plugin);
        assert_eq!(fs::read(&file).unwrap(), bytes);
        assert_eq!(fixture.downloads(), downloads);
    }
    assert_eq!(fixture.left(), ["tpu-0.0.51"]);
}

#[test]
fn an_installation_that_noted_no_sizes_is_still_good() {
    let fixture = Fixture::new(&[("lib/p.so", LIBRARY)]);
    let plugin = fixture.install().0.unwrap();
    let path = plugin.library.with_file_name(MANIFEST);
    let mut manifest: serde_json::Value =
        serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let sizes = manifest.as_object_mut().unwrap().remove("members");
    assert_eq!(sizes, Some(serde_json::json!({"p.so": LIBRARY.len()})));
    fs::write(&path, manifest.to_string()).unwrap();
    assert_eq!(locate_in(&fixture.root(), PluginKind::Tpu).unwrap(), plugin);
    assert_eq!(fixture.install().0.unwrap(), plugin);
    assert_eq!(fixture.downloads(), 1);
}

#[test]
fn a_wheel_with_another_sum_is_refused_and_leaves_nothing() {
    let mut fixture = Fixture::new(&[("lib/p.so", LIBRARY)]);
    fixture.recipe = recipe("00".repeat(32));
    let error = fixture.install().0.unwrap_err();
    assert!(matches!(error, InstallError::Checksum { .. }), "{error}");
    assert!(fixture.left().is_empty());
}

#[test]
fn a_failed_update_keeps_the_old_installation() {
    let mut fixture = Fixture::new(&[("lib/p.so", LIBRARY)]);
    let plugin = fixture.install().0.unwrap();
    fixture.recipe = recipe("00".repeat(32));
    assert!(fixture.install().0.is_err());
    assert_eq!(fs::read(&plugin.library).unwrap(), LIBRARY);
    assert!(locate_in(&fixture.root(), PluginKind::Tpu).is_ok());
}

#[test]
fn a_wheel_with_an_unsafe_path_is_refused() {
    for evil in ["../outside", "/absolute", "lib/../../outside", "lib\\..\\x"] {
        let fixture = Fixture::new(&[("lib/p.so", LIBRARY), (evil, b"x")]);
        let error = fixture.install().0.unwrap_err();
        assert!(
            matches!(&error, InstallError::UnsafePath { entry, .. } if entry == evil),
            "{evil}: {error}"
        );
        assert!(fixture.left().is_empty());
    }
}

#[test]
fn a_wheel_without_its_member_is_refused() {
    let fixture = Fixture::new(&[("lib/q.so", LIBRARY)]);
    let error = fixture.install().0.unwrap_err();
    assert!(
        matches!(&error, InstallError::MissingMember { member, .. } if member == "lib/p.so"),
        "{error}"
    );
}

#[test]
fn missing_pip_is_named_with_the_command_that_installs_it() {
    let mut fixture = Fixture::new(&[("lib/p.so", LIBRARY)]);
    fixture.tools.python = "/no/such/python3".into();
    let text = fixture.install().0.unwrap_err().to_string();
    assert!(
        text.contains("`sudo apt-get update && sudo apt-get install --yes python3-pip`"),
        "{text}"
    );
}

#[test]
fn pip_errors_reach_the_user() {
    let fixture = Fixture::new(&[("lib/p.so", LIBRARY)]);
    fs::write(
        &fixture.tools.python,
        "#!/bin/sh\ncase \"$*\" in *--version*) exit 0 ;; esac\necho 'ERROR: no route to the mirror' >&2\nexit 1\n",
    )
    .unwrap();
    let text = fixture.install().0.unwrap_err().to_string();
    assert!(text.contains("some-plugin==0.0.51"), "{text}");
    assert!(text.contains("no route to the mirror"), "{text}");
}

#[test]
fn simultaneous_installations_download_once() {
    let fixture = Fixture::new(&[("lib/p.so", LIBRARY)]);
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let result = fixture.install().0;
                results.lock().unwrap().push(result);
            });
        }
    });
    for result in results.into_inner().unwrap() {
        assert_eq!(fs::read(result.unwrap().library).unwrap(), LIBRARY);
    }
    assert_eq!(fixture.downloads(), 1);
}

#[test]
fn an_own_plugin_goes_first_until_the_pinned_one_is_asked_for() {
    let fixture = Fixture::new(&[("lib/p.so", LIBRARY)]);
    let own = fixture.dir.path().join("own.so");
    fs::write(&own, LIBRARY).unwrap();
    let local = install_local(&fixture.root(), PluginKind::Tpu, &own, &mut |_| {}).unwrap();
    assert_eq!(local.version, "local");
    assert_eq!(local.library, fs::canonicalize(&own).unwrap());
    assert_eq!(locate_in(&fixture.root(), PluginKind::Tpu).unwrap(), local);

    // One that was built again is taken again from where it is.
    fs::write(&own, [LIBRARY, b"another build"].concat()).unwrap();
    let error = locate_in(&fixture.root(), PluginKind::Tpu).unwrap_err();
    let remedy = format!(
        "run `maxdiff-rs plugin install tpu --path {}`",
        local.library.display()
    );
    assert!(error.to_string().contains(&remedy), "{error}");

    let (pinned, _) = fixture.install();
    assert_eq!(
        locate_in(&fixture.root(), PluginKind::Tpu).unwrap(),
        pinned.unwrap()
    );
    assert!(own.exists(), "the user's file was removed");
}

#[test]
fn a_plugin_is_tried_before_its_first_load_and_after_a_change() {
    let fixture = Fixture::new(&[("lib/p.so", LIBRARY)]);
    let library = fixture.install().0.unwrap().library;
    let trials = Cell::new(0);
    let locate = |trial: Trial| {
        locate_checked_in(&fixture.root(), PluginKind::Tpu, &|_| {
            trials.set(trials.get() + 1);
            trial.clone()
        })
    };
    let ended = Trial::Ended("signal: 4".to_owned());
    let error = locate(ended.clone()).unwrap_err().to_string();
    let expected =
        "ends the process that loads it (signal: 4); run `maxdiff-rs plugin install tpu`";
    assert!(error.contains(expected), "{error}");
    locate(Trial::Unknown).unwrap();
    locate(Trial::Loaded).unwrap();
    assert_eq!(trials.get(), 3);
    locate(ended).unwrap();
    assert_eq!(trials.get(), 3, "it was loaded before");

    // The same bytes at another time, then others of the same length.
    let set_seconds = |seconds| {
        let time = UNIX_EPOCH + Duration::from_secs(seconds);
        File::open(&library).unwrap().set_modified(time).unwrap();
    };
    set_seconds(1);
    locate(Trial::Loaded).unwrap();
    assert_eq!(trials.get(), 4);
    let mut other = LIBRARY.to_vec();
    other.reverse();
    fs::write(&library, other).unwrap();
    set_seconds(2);
    let error = locate(Trial::Loaded).unwrap_err();
    assert!(error.to_string().contains("SHA-256"), "{error}");
    assert_eq!(trials.get(), 4);
}

#[test]
fn files_that_are_no_plugins_are_refused() {
    let dir = TempDir::new().unwrap();
    for (bytes, reason) in [
        (&b"text"[..], "not an ELF"),
        (b"\x7fELF without the function", "does not export"),
    ] {
        let path = dir.path().join("x.so");
        fs::write(&path, bytes).unwrap();
        let error = install_local(dir.path(), PluginKind::Cpu, &path, &mut |_| {}).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
    }
}

#[test]
fn the_searched_name_may_cross_a_block_boundary() {
    let mut bytes = vec![b'-'; (1 << 20) - 4];
    bytes.extend_from_slice(b"GetPjrtApi\0");
    assert!(contains(&bytes[..], b"GetPjrtApi\0").unwrap());
    assert!(!contains(&bytes[..bytes.len() - 1], b"GetPjrtApi\0").unwrap());
}

#[test]
fn an_absent_plugin_names_the_command() {
    let dir = TempDir::new().unwrap();
    for kind in PluginKind::ALL {
        let text = locate_in(dir.path(), kind).unwrap_err().to_string();
        assert!(
            text.contains(&format!("maxdiff-rs plugin install {kind}")),
            "{text}"
        );
        assert_eq!(kind.name().parse::<PluginKind>().unwrap(), kind);
    }
    assert!("gpu".parse::<PluginKind>().is_err());
}

#[test]
fn a_damaged_manifest_is_an_error_that_names_it() {
    let dir = TempDir::new().unwrap();
    let folder = dir.path().join("cpu-2.21.0");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join(MANIFEST), "{\"kind\": \"cpu\"").unwrap();
    let text = list_in(dir.path()).unwrap_err().to_string();
    assert!(text.contains("cpu-2.21.0"), "{text}");
}

#[test]
fn the_table_is_well_formed() {
    for recipe in RECIPES {
        assert_eq!(recipe.version, recipe.kind.pinned_version());
        for wheel in recipe.wheels {
            assert_eq!(wheel.sha256.len(), 64);
            assert!(wheel.sha256.bytes().all(|byte| byte.is_ascii_hexdigit()));
            assert!(wheel.size < recipe.disk);
        }
        let members = recipe.wheels.iter().flat_map(|wheel| wheel.members);
        assert!(
            recipe.compiled
                || members
                    .into_iter()
                    .any(|member| member.to == recipe.library)
        );
    }
    assert!(recipe_for(RECIPES, PluginKind::Tpu, "macos", "aarch64", false).is_err());
    // The libraries that programs call are a gigabyte, which only a GPU needs.
    let [alone, with_gpu] = [false, true]
        .map(|has_gpu| recipe_for(RECIPES, PluginKind::Cuda, "linux", "x86_64", has_gpu).unwrap());
    let has_cudnn = |recipe: &Recipe| {
        let mut wheels = recipe.wheels.iter();
        wheels.any(|wheel| wheel.name == "nvidia-cudnn-cu13")
    };
    assert!(has_cudnn(with_gpu) && !has_cudnn(alone));
}

#[test]
fn every_source_of_the_plugin_is_embedded() {
    fn walk(dir: &Path, root: &Path, names: &mut Vec<String>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, root, names);
            } else {
                let name = path.strip_prefix(root).unwrap();
                names.push(name.to_str().unwrap().to_owned());
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("plugin");
    let mut names = Vec::new();
    walk(&root, &root, &mut names);
    names.sort();
    let mut embedded: Vec<&str> = SOURCES.iter().map(|(name, _)| *name).collect();
    embedded.sort_unstable();
    assert_eq!(names, embedded);
}
