//! Checkpoints under faults of the process and the device: a child process saves, and is killed or
//! runs into a limit.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use maxdiff::dtype::DType;
use maxdiff::shape::Shape;
use maxdiff::train::checkpoint::{
    Check, CheckpointFile, CheckpointWriter, Content, TrainState, latest,
};
use maxdiff::weights::TensorSpec;

const DIR: &str = "MAXDIFF_TEST_CHECKPOINT_DIR";
const TENSOR_FILES: [&str; 2] = [
    "unet/diffusion_pytorch_model.safetensors",
    "optimizer.safetensors",
];

fn specs(elements: usize) -> Vec<TensorSpec> {
    ["a", "b", "c"]
        .map(|name| TensorSpec {
            name: name.to_owned(),
            shape: Shape::new(DType::F32, [elements]),
        })
        .to_vec()
}

/// Bytes that differ between steps, files and tensors.
fn bytes_of(step: u64, file: &str, spec: &TensorSpec) -> Vec<u8> {
    let mut x = step * 1000 + (file.len() * 10) as u64 + u64::from(spec.name.as_bytes()[0]);
    (0..spec.shape.bytes())
        .map(|_| {
            x = lcg(x);
            (x >> 56) as u8
        })
        .collect()
}

/// A linear congruential generator (Knuth's MMIX constants): random enough to tell bytes apart.
fn lcg(x: u64) -> u64 {
    x.wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407)
}

fn files(step: u64, elements: usize) -> Vec<CheckpointFile<'static>> {
    TENSOR_FILES
        .map(|file| CheckpointFile {
            path: file.to_owned(),
            content: Content::Tensors {
                specs: specs(elements),
                metadata: BTreeMap::new(),
                fetch: Box::new(move |spec| Ok(bytes_of(step, file, spec).into())),
            },
        })
        .into()
}

fn state(step: u64) -> TrainState {
    TrainState::new(step, BTreeMap::new())
}

/// The step of the newest checkpoint, all its bytes compared with what was saved.
fn newest_step(dir: &Path, elements: usize) -> Option<u64> {
    let saved = latest(dir, Check::Hashes).unwrap().checkpoint?;
    let step = saved.state().step;
    for file in TENSOR_FILES {
        let tensors = saved.tensors(file).unwrap();
        for spec in specs(elements) {
            let read = tensors.read(&spec.name).unwrap();
            assert!(
                read.data == bytes_of(step, file, &spec),
                "{file} {}: bytes differ",
                spec.name
            );
        }
    }
    Some(step)
}

fn child(test: &str, dir: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(DIR, dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    command
}

/// The folder that a parent test gave; none when someone runs the ignored tests by hand.
fn given_dir() -> Option<PathBuf> {
    std::env::var_os(DIR).map(PathBuf::from)
}

const KILL_ELEMENTS: usize = 20_000;

#[test]
#[ignore = "the child process of a_process_killed_at_any_moment_loses_no_committed_checkpoint"]
fn saves_until_killed() {
    let Some(dir) = given_dir() else { return };
    let mut writer = CheckpointWriter::open(&dir).unwrap();
    let newest = latest(&dir, Check::Sizes).unwrap().checkpoint;
    let mut step = newest.map_or(0, |c| c.state().step);
    println!("\nready");
    loop {
        step += 1;
        writer
            .save(&state(step), files(step, KILL_ELEMENTS))
            .unwrap();
        println!("committed {step}");
        std::io::stdout().flush().unwrap();
        writer.keep_last(2).unwrap();
    }
}

/// Kills the child `delay` after it is ready; returns the last step it said to have committed.
fn kill_after(mut child: Child, delay: Duration) -> Option<u64> {
    let mut lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map_while(Result::ok);
    assert!(lines.any(|l| l == "ready"), "the child did not start");
    std::thread::sleep(delay);
    // SIGKILL on Unix.
    child.kill().unwrap();
    child.wait().unwrap();
    lines
        .filter_map(|l| l.strip_prefix("committed ").and_then(|s| s.parse().ok()))
        .last()
}

#[test]
fn a_process_killed_at_any_moment_loses_no_committed_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path();
    let began = Instant::now();
    let mut acknowledged = 0;
    let mut random = 1;
    let mut kills = 0;
    // At least 40 kills, more while it is quick.
    while kills < 40 || began.elapsed() < Duration::from_secs(3) {
        random = lcg(random);
        let delay = Duration::from_micros((random >> 33) % 40_000);
        let child = child("checkpoint_faults::saves_until_killed", dir)
            .spawn()
            .unwrap();
        let last = kill_after(child, delay);
        acknowledged = acknowledged.max(last.unwrap_or(0));
        let newest = newest_step(dir, KILL_ELEMENTS).unwrap_or(0);
        assert!(
            newest >= acknowledged,
            "kill {kills} after {delay:?}: {acknowledged} was committed, {newest} is the newest"
        );
        kills += 1;
    }
    // The kills must have hit saves, or nothing was tested.
    let unfinished = std::fs::read_dir(dir)
        .unwrap()
        .filter(|e| {
            let name = e.as_ref().unwrap().file_name();
            name.to_string_lossy().contains(".tmp-")
        })
        .count();
    assert!(unfinished >= 5, "{unfinished} of {kills} kills hit a save");
    println!("{kills} kills, {unfinished} inside a save, {acknowledged} steps");
    // The lock of the last victim does not keep the next run out, which is told about it.
    let writer = CheckpointWriter::open(dir).unwrap();
    assert!(writer.stale_owner().is_some());
}

/// Too many for a limit of 128 blocks, which are 512 or 1024 bytes.
const LARGE: usize = 200_000;
const SMALL: usize = 1000;

#[test]
#[ignore = "the child process of the tests about full devices"]
fn saves_small_then_large() {
    let Some(dir) = given_dir() else { return };
    let mut writer = CheckpointWriter::open(&dir).unwrap();
    writer.save(&state(1), files(1, SMALL)).unwrap();
    let error = writer.save(&state(2), files(2, LARGE)).unwrap_err();
    println!("error: {error}");
    // The run can go on saving what fits.
    writer.save(&state(3), files(3, SMALL)).unwrap();
    println!("saved 3");
}

fn assert_refused_and_intact(output: &str, dir: &Path) {
    assert!(output.contains("no space left on the device"), "{output}");
    assert!(output.contains("saved 3"), "{output}");
    assert_eq!(newest_step(dir, SMALL), Some(3));
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, [".lock", "step-00000001", "step-00000003"]);
}

#[test]
fn a_file_size_limit_leaves_older_checkpoints_intact() {
    let root = tempfile::tempdir().unwrap();
    let saver = child("checkpoint_faults::saves_small_then_large", root.path());
    // The shell sets the limit, and has a write past it return an error instead of a signal.
    let mut shell = Command::new("sh");
    shell
        .args(["-c", "trap '' XFSZ; ulimit -f 128; exec \"$0\" \"$@\""])
        .arg(saver.get_program())
        .args(saver.get_args())
        .env(DIR, root.path());
    let output = shell.output().unwrap();
    assert_refused_and_intact(&String::from_utf8_lossy(&output.stdout), root.path());
}

/// A small file system in memory, unmounted when dropped.
struct Tmpfs<'a>(&'a Path);

impl<'a> Tmpfs<'a> {
    fn mount(dir: &'a Path, size: &str) -> Self {
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", size, "tmpfs"]).arg(dir);
        assert!(command.status().unwrap().success(), "{command:?}");
        Tmpfs(dir)
    }
}

impl Drop for Tmpfs<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).status();
    }
}

#[test]
#[ignore = "needs root, to mount a small file system"]
fn a_full_device_leaves_older_checkpoints_intact() {
    let root = tempfile::tempdir().unwrap();
    let _mounted = Tmpfs::mount(root.path(), "size=256k");
    let output = child("checkpoint_faults::saves_small_then_large", root.path())
        .output()
        .unwrap();
    assert_refused_and_intact(&String::from_utf8_lossy(&output.stdout), root.path());
}
