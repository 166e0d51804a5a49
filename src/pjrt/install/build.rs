//! Downloads and unpacks wheels, and compiles the CPU plugin.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufReader};
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

use zip::ZipArchive;

use super::files::{
    Staging, create_dir_all, file_name, file_size, remove_file, replace, sha256_of_file, tail,
    write_error,
};
use super::recipe::{CPU_LIBRARY, Member, Recipe, Wheel, source_of};
use super::{InstallError, Manifest, Result, check_is_plugin, write_manifest};
use crate::pjrt::ffi::layout_assertions;
use crate::util::hash::Hasher;

/// Files of `plugin/` by their paths there, with their text.
macro_rules! sources {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../../../plugin/", $name)))),*]
    };
}

/// The CPU plugin's sources, embedded so that an installed program can build it.
pub(super) const SOURCES: &[(&str, &str)] = &sources![
    "cpu_plugin.cc",
    "attention.inc",
    "attention_gradient.inc",
    "buffer.h",
    "client.h",
    "contract.inc",
    "event.h",
    "executable.h",
    "fresh.inc",
    "functions.inc",
    "isa.cc",
    "isa.h",
    "kernel_calls.cc",
    "kernel_calls.h",
    "kernels.h",
    "kernels.inc",
    "memory.h",
    "objects.h",
    "optimizer.inc",
    "pool.h",
    "products.inc",
    "quantized.inc",
    "rows.inc",
    "rows_gradient.inc",
    "set.h",
    "set_avx2.cc",
    "set_avx512.cc",
    "set_avx512_vnni.cc",
    "set_avx_vnni.cc",
    "set_emulated.cc",
    "status.h",
    "stored.inc",
    "stubs/mlir/IR/BuiltinOps.h",
    "threads.cc",
    "threads.h",
    "tiles.inc",
    "values.h",
    "vectors_avx2.inc",
    "vectors_avx512.inc",
    "vectors_scalar.inc",
];

/// The source that [`layout_assertions`] writes beside them.
const LAYOUT_SOURCE: &str = "layout.cc";

/// Compiler options that do not depend on the host. `NDEBUG` must match TensorFlow's build,
/// `ffp-contract=off` makes every rounding that the kernels promise, without `errno` and traps loops of roots and choices
/// become vectors, and `initfirst` lets the
/// plugin silence logs before TensorFlow's initializers write them.
const COMPILE_OPTIONS: &[&str] = &[
    "-std=c++17",
    "-O2",
    "-DNDEBUG",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-Wl,-z,defs",
    "-Wl,-z,initfirst",
    "-Wl,-rpath,$ORIGIN",
];

const INCLUDE_PREFIX: &str = "tensorflow/include/";

/// The parts of the wheel's include tree that the plugin's sources reach: a fifth of it.
const INCLUDE_PARTS: &[&str] = &[
    "Eigen/",
    "absl/",
    "google/",
    "ml_dtypes/",
    "third_party/",
    "tsl/",
    "unsupported/",
    "xla/",
    "external/farmhash_archive/",
    "external/highwayhash/",
    STABLEHLO_VERSION_HEADER,
];

const STABLEHLO_VERSION_HEADER: &str = "external/stablehlo/stablehlo/dialect/Version.h";

/// The programs an installation runs; tests put their own in place.
pub(super) struct Tools {
    pub(super) python: PathBuf,
    pub(super) compiler: PathBuf,
}

impl Default for Tools {
    fn default() -> Self {
        Self {
            python: "python3".into(),
            compiler: "g++".into(),
        }
    }
}

/// Downloads, unpacks and builds in a staging folder, then puts it in place.
pub(super) fn make(
    root: &Path,
    folder: &Path,
    recipe: &Recipe,
    tools: &Tools,
    progress: &mut dyn FnMut(&str),
) -> Result<Manifest> {
    check_tools(recipe, tools)?;
    let staging = Staging::create(root, recipe.kind)?;
    let content = staging.path.join("content");
    let build = staging.path.join("build");
    for dir in [&content, &build] {
        create_dir_all(dir, recipe.disk)?;
    }
    let mut members = BTreeMap::new();
    let mut members_sha256 = BTreeMap::new();
    for wheel in recipe.wheels {
        progress(&format!(
            "downloading {} {} ({} MB)",
            wheel.name,
            wheel.version,
            wheel.size / 1_000_000
        ));
        let file = download(wheel, &staging.path.join("download"), tools)?;
        progress(&format!("unpacking {} {}", wheel.name, wheel.version));
        let headers = recipe.compiled.then_some(build.as_path());
        for (path, member) in unpack(wheel, &file, &content, headers, recipe.disk)? {
            members.insert(path.clone(), member.size);
            members_sha256.insert(path, member.sha256);
        }
        remove_file(&file)?;
    }
    if recipe.compiled {
        progress("compiling the CPU plugin with g++ (about three minutes)");
        compile(&build, &content, tools)?;
    }
    let library = content.join(recipe.library);
    check_is_plugin(&library)?;
    // The manifest is on the disk before the folder gets its name, so what it describes has to be there too.
    File::open(&library)
        .and_then(|file| file.sync_all())
        .map_err(|source| write_error(&library, recipe.disk, source))?;
    let manifest = Manifest {
        kind: recipe.kind,
        version: recipe.version.to_owned(),
        library: recipe.library.into(),
        sha256: sha256_of_file(&library)?,
        size: file_size(&library)?,
        source: source_of(recipe),
        cuda_data_dir: recipe.cuda_data_dir.map(PathBuf::from),
        sources_sha256: recipe.compiled.then(sources_sha256),
        members,
        members_sha256,
    };
    write_manifest(&content, &manifest)?;
    replace(&content, folder, &staging.path.join("old"))?;
    Ok(manifest)
}

/// Fails before a long download when a tool that is needed later is missing.
fn check_tools(recipe: &Recipe, tools: &Tools) -> Result<()> {
    let pip = Command::new(&tools.python)
        .args(["-m", "pip", "--version"])
        .output();
    tool_result(
        pip,
        "python3 with pip",
        "to download the plugin",
        "sudo apt-get update && sudo apt-get install --yes python3-pip",
    )?;
    if recipe.compiled {
        let compiler = Command::new(&tools.compiler).arg("--version").output();
        tool_result(
            compiler,
            "g++",
            "to build the CPU plugin",
            "sudo apt-get update && sudo apt-get install --yes g++",
        )?;
    }
    Ok(())
}

fn tool_result(
    output: io::Result<Output>,
    tool: &'static str,
    purpose: &'static str,
    remedy: &'static str,
) -> Result<()> {
    let reason = match output {
        Ok(output) if output.status.success() => return Ok(()),
        Ok(output) => tail(&output.stderr, 1),
        Err(error) => error.to_string(),
    };
    Err(InstallError::MissingTool {
        tool,
        purpose,
        remedy,
        reason,
    })
}

/// Fetches `wheel` into `dir` with pip and checks its sum. Interpreter and platform are fixed, so
/// that the result does not depend on the host's Python.
fn download(wheel: &Wheel, dir: &Path, tools: &Tools) -> Result<PathBuf> {
    let requirement = format!("{}=={}", wheel.name, wheel.version);
    let output = Command::new(&tools.python)
        .args(["-m", "pip", "download", "--quiet", "--no-input"])
        .args(["--disable-pip-version-check", "--progress-bar=off"])
        .args(["--no-deps", "--only-binary=:all:"])
        .args(["--python-version=3.11", "--implementation=cp"])
        .arg(format!("--platform={}", wheel.platform))
        .arg("--dest")
        .arg(dir)
        .arg(&requirement)
        .output()
        .map_err(|source| InstallError::Io {
            action: "run",
            path: tools.python.clone(),
            source,
        })?;
    let failed = |output: String| InstallError::Download {
        wheel: requirement.clone(),
        output,
    };
    if !output.status.success() {
        return Err(failed(tail(&output.stderr, 12)));
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).map_err(|source| InstallError::Io {
        action: "read",
        path: dir.to_owned(),
        source,
    })? {
        let path = entry
            .map_err(|source| InstallError::Io {
                action: "read",
                path: dir.to_owned(),
                source,
            })?
            .path();
        if path.extension().is_some_and(|extension| extension == "whl") {
            files.push(path);
        }
    }
    let [file] = files.as_slice() else {
        return Err(failed(format!(
            "pip left {} wheels, expected one",
            files.len()
        )));
    };
    let found = sha256_of_file(file)?;
    if found != wheel.sha256 {
        return Err(InstallError::Checksum {
            file: file_name(file),
            expected: wheel.sha256.to_owned(),
            found,
        });
    }
    Ok(file.clone())
}

/// A member of a wheel as it was unpacked.
struct Unpacked {
    /// In bytes.
    size: u64,
    sha256: String,
}

/// Unpacks the members of `wheel` into `content`, and the headers the plugin's sources need into
/// `headers`. Gives the members by their paths in `content`.
fn unpack(
    wheel: &Wheel,
    file: &Path,
    content: &Path,
    headers: Option<&Path>,
    disk: u64,
) -> Result<BTreeMap<PathBuf, Unpacked>> {
    let name = file_name(file);
    let reader = File::open(file).map_err(|source| InstallError::Io {
        action: "read",
        path: file.to_owned(),
        source,
    })?;
    let mut archive =
        ZipArchive::new(BufReader::new(reader)).map_err(|source| InstallError::Archive {
            file: name.clone(),
            source,
        })?;
    let mut members = BTreeMap::new();
    for index in 0..archive.len() {
        let mut entry = archive
            .by_index(index)
            .map_err(|source| InstallError::Archive {
                file: name.clone(),
                source,
            })?;
        let Some(path) = safe_path(entry.name_raw()).filter(|_| !entry.is_symlink()) else {
            return Err(InstallError::UnsafePath {
                file: name,
                entry: String::from_utf8_lossy(entry.name_raw()).into_owned(),
            });
        };
        if entry.is_dir() {
            continue;
        }
        let member = wheel.members.iter().find(|m| Path::new(m.from) == path);
        let target = match member {
            Some(member) => content.join(member.to),
            None => match (headers, path.to_str()) {
                (Some(build), Some(text)) if is_needed_header(text) => build.join(&path),
                _ => continue,
            },
        };
        if let Some(parent) = target.parent() {
            create_dir_all(parent, disk)?;
        }
        let written = File::create(&target).and_then(|mut out| {
            let size = io::copy(&mut entry, &mut out)?;
            set_mode(&out, entry.unix_mode())?;
            // Headers are only read by the compiler that runs next, and go with the build folder.
            if member.is_some() {
                out.sync_all()?;
            }
            Ok(size)
        });
        let size = written.map_err(|source| write_error(&target, disk, source))?;
        if let Some(member) = member {
            let sha256 = sha256_of_file(&target)?;
            members.insert(PathBuf::from(member.to), Unpacked { size, sha256 });
        }
    }
    let missing = |member: &&Member| !members.contains_key(Path::new(member.to));
    match wheel.members.iter().find(missing) {
        None => Ok(members),
        Some(member) => Err(InstallError::MissingMember {
            file: name,
            member: member.from.to_owned(),
        }),
    }
}

/// The entry's path when it is plainly relative: no root, no `..`, no oddities that a later reader
/// could take for them.
fn safe_path(name: &[u8]) -> Option<PathBuf> {
    let name = std::str::from_utf8(name).ok()?;
    let plain = !name.contains(['\\', '\0'])
        && Path::new(name)
            .components()
            .all(|component| matches!(component, Component::Normal(_)));
    plain.then(|| PathBuf::from(name))
}

fn is_needed_header(path: &str) -> bool {
    path.strip_prefix(INCLUDE_PREFIX)
        .is_some_and(|rest| INCLUDE_PARTS.iter().any(|part| rest.starts_with(part)))
}

#[cfg(unix)]
fn set_mode(file: &File, mode: Option<u32>) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    // ptxas is run; wheels mark it executable for its owner only.
    let executable = mode.is_some_and(|mode| mode & 0o100 != 0);
    file.set_permissions(fs::Permissions::from_mode(if executable {
        0o755
    } else {
        0o644
    }))
}

#[cfg(not(unix))]
fn set_mode(_file: &File, _mode: Option<u32>) -> io::Result<()> {
    Ok(())
}

/// Compiles the embedded sources against the headers in `build` into `content`.
fn compile(build: &Path, content: &Path, tools: &Tools) -> Result<()> {
    let sources = build.join("plugin");
    let assertions = layout_assertions();
    let generated = (LAYOUT_SOURCE, assertions.as_str());
    for (name, text) in SOURCES.iter().copied().chain([generated]) {
        let path = sources.join(name);
        if let Some(parent) = path.parent() {
            create_dir_all(parent, 0)?;
        }
        fs::write(&path, text).map_err(|source| write_error(&path, 0, source))?;
    }
    let include = build.join(INCLUDE_PREFIX);
    let mut command = Command::new(&tools.compiler);
    command.args(COMPILE_OPTIONS);
    command.arg("-I").arg(sources.join("stubs"));
    command.arg("-isystem").arg(&include);
    for package in ["farmhash_archive/src", "highwayhash"] {
        command
            .arg("-isystem")
            .arg(include.join("external").join(package));
    }
    if let Some((current, minimum)) = stablehlo_versions(&include.join(STABLEHLO_VERSION_HEADER))? {
        command.arg(format!("-DMAXDIFF_STABLEHLO_CURRENT={current}"));
        command.arg(format!("-DMAXDIFF_STABLEHLO_MINIMUM={minimum}"));
    }
    command.arg(format!("-DMAXDIFF_SOURCES=\"{}\"", sources_sha256()));
    let is_compiled = |name: &&str| name.ends_with(".cc");
    let compiled = SOURCES.iter().map(|(name, _)| *name).filter(is_compiled);
    let output = command
        .args(
            compiled
                .chain([LAYOUT_SOURCE])
                .map(|name| sources.join(name)),
        )
        .arg("-o")
        .arg(content.join(CPU_LIBRARY))
        .arg("-L")
        .arg(content)
        .args([
            "-l:libtensorflow_cc.so.2",
            "-l:libtensorflow_framework.so.2",
        ])
        .output()
        .map_err(|source| InstallError::Io {
            action: "run",
            path: tools.compiler.clone(),
            source,
        })?;
    if output.status.success() {
        return Ok(());
    }
    // The first error matters; what follows is its echo.
    let text = String::from_utf8_lossy(&output.stderr);
    let from = text
        .lines()
        .position(|line| line.contains("error") || line.contains("undefined reference"))
        .unwrap_or(0);
    Err(InstallError::Compile {
        output: text
            .lines()
            .skip(from)
            .take(20)
            .collect::<Vec<_>>()
            .join("\n"),
    })
}

/// StableHLO's current and minimum version, as lists for the compiler, from the header that
/// defines them; `None` when it no longer looks as expected, which leaves the attributes out.
fn stablehlo_versions(header: &Path) -> Result<Option<(String, String)>> {
    let text = fs::read_to_string(header).map_err(|source| InstallError::Io {
        action: "read",
        path: header.to_owned(),
        source,
    })?;
    let version = |function: &str| -> Option<String> {
        let (_, rest) = text.split_once(function)?;
        let (_, rest) = rest.split_once("Version(")?;
        let (list, _) = rest.split_once(')')?;
        let numbers: Option<Vec<u64>> = list.split(',').map(|n| n.trim().parse().ok()).collect();
        let numbers = numbers.filter(|numbers| numbers.len() == 3)?;
        Some(format!("{},{},{}", numbers[0], numbers[1], numbers[2]))
    };
    Ok(version("getCurrentVersion()").zip(version("getMinimumVersion()")))
}

/// Of the embedded sources and the options they are compiled with. A plugin says the sum of its
/// own, so that this program knows whether the plugin's kernels are those that it calls.
pub(in crate::pjrt) fn sources_sha256() -> String {
    static SUM: LazyLock<String> = LazyLock::new(|| {
        let options = COMPILE_OPTIONS.iter().copied();
        let sources = SOURCES.iter().flat_map(|(name, text)| [*name, *text]);
        let mut hasher = Hasher::default();
        for part in options.chain(sources).chain([layout_assertions().as_str()]) {
            hasher.update(part);
            hasher.update([0]);
        }
        hasher.finish().to_string()
    });
    SUM.clone()
}
