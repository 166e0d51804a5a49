//! `generate` that something ends before it is done.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::Value;

use crate::generate::command;

/// 50 batches of images.
const WORDS: [&str; 7] = [
    "prompt=x",
    "height=16",
    "width=16",
    "num_inference_steps=2",
    "scheduler=ddim",
    "num_images_per_prompt=400",
    "--json",
];

/// The paths of a folder's images, each of which is whole. There is nothing else in it.
fn whole_images(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap();
    let paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    for path in &paths {
        image::open(path).unwrap();
    }
    paths
}

/// Removes the file that was being written when its writer was killed.
fn remove_partial(folder: &Path) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "partial") {
            std::fs::remove_file(path).unwrap();
        }
    }
}

fn send(signal: &str, child: &Child) {
    let id = child.id().to_string();
    let status = Command::new("kill").args(["-s", signal, &id]).status();
    assert!(status.unwrap().success());
}

/// The first batches are finished when something ends the call.
#[test]
fn what_is_finished_is_kept() {
    // Gives the code, what was told, and the paths of the images, after `end` of the child and the folder of images.
    let ended = |end: &dyn Fn(&Child, &Path)| {
        let dir = tempfile::tempdir().unwrap();
        let mut command = command(dir.path(), &WORDS);
        let pipes = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = pipes.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert_eq!(first["seed"], 0);
        let folder = dir.path().join("images");
        end(&child, &folder);
        let more = lines.count();
        let output = child.wait_with_output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        let kept = [folder.clone(), folder.with_extension("moved")];
        let kept = kept.iter().find(|folder| folder.exists()).unwrap();
        if !folder.exists() {
            // A writer that has lost its folder cannot remove what it was writing.
            remove_partial(kept);
        }
        let names = whole_images(kept);
        assert!(names.len() > more && names.len() < 400, "{}", names.len());
        let written = format!(
            "{} of 400 images are written in {}",
            names.len(),
            folder.display()
        );
        assert!(told.contains(&written), "{told}");
        (output.status.code(), told)
    };
    let signalled = |signal: &str| {
        ended(&|child, _| {
            send(signal, child);
        })
    };
    for (signal, code) in [("TERM", 143), ("INT", 130)] {
        let (found, told) = signalled(signal);
        assert_eq!(found, Some(code), "{told}");
        assert!(told.contains("stopped: "), "{told}");
    }
    let (found, told) = ended(&|_, folder| {
        std::fs::rename(folder, folder.with_extension("moved")).unwrap();
    });
    assert_eq!(found, Some(1), "{told}");
    assert!(told.contains("error: cannot write "), "{told}");
}

/// A file that may not grow stands for a disk that is full.
#[test]
#[cfg(unix)]
fn a_full_disk_is_an_error_that_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = command(
        dir.path(),
        &["prompt=x", "height=16", "width=16", "num_inference_steps=1"],
    );
    let mut limited = Command::new("sh");
    limited
        .args(["-c", "trap '' XFSZ; ulimit -f 1; exec \"$0\" \"$@\""])
        .arg(command.get_program())
        .args(command.get_args())
        .envs(
            command
                .get_envs()
                .filter_map(|(key, value)| Some((key, value?))),
        )
        .stdin(Stdio::null());
    let output = limited.output().unwrap();
    let found = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{found}");
    assert!(found.contains("image-00001.png: File too large"), "{found}");
    assert!(
        found.contains("set output_dir to a folder on another disk"),
        "{found}"
    );
    let left = std::fs::read_dir(dir.path().join("images"))
        .unwrap()
        .count();
    assert_eq!(left, 0);
    // Without the limit it is drawn.
    assert!(command.output().unwrap().status.success());
}

/// The first call is ended at its first image, the others at any moment up to twice that time; `MAXDIFF_STOPS` says how many.
#[test]
#[cfg(unix)]
fn an_end_at_any_moment_keeps_every_finished_image() {
    use std::os::unix::process::ExitStatusExt;

    let stops = std::env::var("MAXDIFF_STOPS").map_or(6, |count| count.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("images");
    let mut moments = StdRng::seed_from_u64(0);
    let mut to_first_image = None;
    let mut kept = 0;
    for (signal, number) in [("TERM", 15), ("INT", 2), ("KILL", 9)]
        .into_iter()
        .cycle()
        .take(stops)
    {
        // One folder for all: what an earlier call left is in the way of none.
        let mut command = command(dir.path(), &WORDS);
        let stdout = dir.path().join("stdout");
        let child = command
            .stdout(std::fs::File::create(&stdout).unwrap())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        match to_first_image {
            Some(time) => sleep(moments.random_range(Duration::ZERO..2 * time)),
            None => {
                let start = Instant::now();
                while std::fs::read(&stdout).unwrap().is_empty() {
                    assert!(start.elapsed() < Duration::from_secs(300), "no image");
                    sleep(Duration::from_millis(5));
                }
                to_first_image = Some(start.elapsed());
            }
        }
        send(signal, &child);
        let output = child.wait_with_output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(!told.contains("panicked"), "{told}");
        // Before the signals are taken, they end the process themselves.
        let by_signal = output.status.signal() == Some(number);
        let by_code = number != 9 && output.status.code() == Some(128 + number);
        assert!(by_signal || by_code, "{signal}: {}: {told}", output.status);

        let before = kept;
        if folder.exists() {
            if number == 9 {
                remove_partial(&folder);
            }
            kept = whole_images(&folder).len();
        }
        let lines = std::fs::read_to_string(&stdout).unwrap();
        let lines: Vec<Value> = lines
            .split_inclusive('\n')
            .filter(|line| line.ends_with('\n'))
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        for line in &lines {
            assert!(Path::new(line["path"].as_str().unwrap()).exists(), "{line}");
        }
        let new = kept - before;
        assert!(new >= lines.len(), "{new} images, {} lines", lines.len());
        if by_code && new > 0 {
            let written = format!("{new} of 400 images are written in {}", folder.display());
            assert!(told.contains(&written), "{told}");
        }
    }
}
