use serde_json::json;

use super::*;
use crate::dtype::DType;
use crate::shape::Shape;

/// Two tensors whose bytes follow from the step.
fn specs() -> Vec<TensorSpec> {
    vec![
        TensorSpec {
            name: "conv_in.weight".to_owned(),
            shape: Shape::new(DType::F32, [40, 7]),
        },
        TensorSpec {
            name: "conv_in.bias".to_owned(),
            shape: Shape::new(DType::BF16, [40]),
        },
    ]
}

fn bytes_of(step: u64, spec: &TensorSpec) -> Vec<u8> {
    let seed = step as usize * 31 + spec.name.len();
    (0..spec.shape.bytes())
        .map(|i| (seed + i * 7) as u8)
        .collect()
}

fn state(step: u64) -> TrainState {
    let mut state = TrainState::new(step, BTreeMap::from([("seed".to_owned(), json!(1))]));
    state.seeds.insert("dropout".to_owned(), u64::MAX);
    state.data = json!({"epoch": 1, "index": step});
    state
}

fn files(step: u64) -> Vec<CheckpointFile<'static>> {
    vec![
        CheckpointFile {
            path: "unet/config.json".to_owned(),
            content: Content::Bytes(b"{\"sample_size\": 32}\n".as_slice().into()),
        },
        CheckpointFile {
            path: "unet/diffusion_pytorch_model.safetensors".to_owned(),
            content: Content::Tensors {
                specs: specs(),
                metadata: BTreeMap::from([("format".to_owned(), "pt".to_owned())]),
                fetch: Box::new(move |spec| Ok(bytes_of(step, spec).into())),
            },
        },
    ]
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn found(root: &Path, check: Check) -> (Option<u64>, Vec<Skipped>) {
    let latest = latest(root, check).unwrap();
    (latest.checkpoint.map(|c| c.state().step), latest.skipped)
}

#[test]
fn what_was_saved_is_loaded() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path().join("output/checkpoints");
    let mut writer = CheckpointWriter::open(&root).unwrap();
    let dir = writer.save(&state(1000), files(1000)).unwrap();
    assert_eq!(dir, root.join("step-00001000"));

    let latest = latest(&root, Check::Hashes).unwrap();
    assert_eq!(latest.skipped, []);
    let saved = latest.checkpoint.unwrap();
    assert_eq!(saved.state(), &state(1000));
    assert_eq!(
        saved.bytes("unet/config.json").unwrap(),
        b"{\"sample_size\": 32}\n"
    );
    let tensors = saved
        .tensors("unet/diffusion_pytorch_model.safetensors")
        .unwrap();
    for spec in specs() {
        let tensor = tensors.read(&spec.name).unwrap();
        assert_eq!(tensor.shape, spec.shape);
        assert_eq!(tensor.data, bytes_of(1000, &spec));
    }
    // The submodule directory stands on its own, as diffusers wants it.
    assert_eq!(
        Checkpoint::open(&dir.join("unet")).unwrap().iter().count(),
        2
    );
    let error = saved
        .bytes("optimizer.safetensors")
        .unwrap_err()
        .to_string();
    assert!(
        error.ends_with(
            "it has unet/config.json, unet/diffusion_pytorch_model.safetensors, state.json"
        ),
        "{error}"
    );
}

#[test]
fn a_step_that_exists_is_not_overwritten() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    fs::create_dir(root.join("step-00000005")).unwrap();
    fs::write(root.join("step-00000005/mine"), "precious").unwrap();
    let mut writer = CheckpointWriter::open(root).unwrap();
    let first = writer.save(&state(5), files(5)).unwrap();
    let second = writer.save(&state(5), files(5)).unwrap();
    assert_eq!(first, root.join("step-00000005-1"));
    assert_eq!(second, root.join("step-00000005-2"));
    assert_eq!(
        fs::read(root.join("step-00000005/mine")).unwrap(),
        b"precious"
    );
    let newest = latest(root, Check::Hashes).unwrap().checkpoint.unwrap();
    assert_eq!(newest.dir(), second);
}

#[test]
fn only_own_checkpoints_are_deleted() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let mut earlier = CheckpointWriter::open(root).unwrap();
    earlier.save(&state(1), files(1)).unwrap();
    drop(earlier);
    fs::create_dir(root.join("step-00000002.tmp-99")).unwrap();
    fs::create_dir(root.join("notes")).unwrap();

    let mut writer = CheckpointWriter::open(root).unwrap();
    for step in 2..6 {
        writer.save(&state(step), files(step)).unwrap();
    }
    let deleted = writer.keep_last(2).unwrap();
    assert_eq!(
        deleted,
        [root.join("step-00000002"), root.join("step-00000003")]
    );
    assert_eq!(
        names(root),
        [
            ".lock",
            "notes",
            "step-00000001",
            "step-00000002.tmp-99",
            "step-00000004",
            "step-00000005"
        ]
    );
    assert_eq!(writer.keep_last(0).unwrap(), [root.join("step-00000004")]);
    assert_eq!(found(root, Check::Hashes).0, Some(5));
}

/// The link leads to the lowest loss of all runs, and that checkpoint stays while its run goes on.
#[test]
fn the_best_by_validation_is_kept() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let best = || fs::read_link(root.join(BEST)).ok();
    let mut writer = CheckpointWriter::open(root).unwrap();
    let save = |writer: &mut CheckpointWriter, step, validation_loss| {
        let state = TrainState {
            validation_loss,
            ..state(step)
        };
        writer.save(&state, files(step)).unwrap();
        writer.keep_last(1).unwrap();
    };
    save(&mut writer, 1, None);
    assert_eq!(best(), None);
    for (step, loss, lowest) in [(2, 0.5, 2), (3, 0.4, 3), (4, 0.45, 3), (5, 0.6, 3)] {
        save(&mut writer, step, Some(loss));
        assert_eq!(best().unwrap(), Path::new(&format!("step-{lowest:08}")));
    }
    assert_eq!(
        names(root),
        [".lock", "best", "step-00000003", "step-00000005"]
    );
    assert_eq!(found(root, Check::Hashes), (Some(5), Vec::new()));
    drop(writer);
    let mut writer = CheckpointWriter::open(root).unwrap();
    save(&mut writer, 6, Some(0.41));
    assert_eq!(best().unwrap(), Path::new("step-00000003"));
    save(&mut writer, 7, Some(0.3));
    assert_eq!(best().unwrap(), Path::new("step-00000007"));
    let saved = SavedCheckpoint::open(&root.join(BEST)).unwrap();
    assert_eq!(saved.state().validation_loss, Some(0.3));
}

#[test]
fn a_failure_while_saving_leaves_no_trace() {
    let root = tempfile::tempdir().unwrap();
    let mut writer = CheckpointWriter::open(root.path()).unwrap();
    writer.save(&state(1), files(1)).unwrap();
    let mut failing = files(2);
    failing.push(CheckpointFile {
        path: "optimizer.safetensors".to_owned(),
        content: Content::Tensors {
            specs: specs(),
            metadata: BTreeMap::new(),
            fetch: Box::new(|_| Err("the device is gone".into())),
        },
    });
    let error = writer.save(&state(2), failing).unwrap_err().to_string();
    assert!(
        error.contains("optimizer.safetensors: tensor conv_in.weight: the device is gone"),
        "{error}"
    );
    let huge = vec![CheckpointFile {
        path: "huge.safetensors".to_owned(),
        content: Content::Tensors {
            specs: vec![TensorSpec {
                name: "huge".to_owned(),
                shape: Shape::new(DType::U8, [1_usize << 60]),
            }],
            metadata: BTreeMap::new(),
            fetch: Box::new(|_| Err("asked for bytes that cannot fit".into())),
        },
    }];
    let error = writer.save(&state(2), huge).unwrap_err();
    assert!(
        matches!(
            error,
            CheckpointError::Weights(WeightsError::NoSpace { .. })
        ),
        "{error}"
    );
    assert_eq!(names(root.path()), [".lock", "step-00000001"]);
    // The same writer goes on once there is space again.
    writer.save(&state(2), files(2)).unwrap();
    assert_eq!(found(root.path(), Check::Hashes), (Some(2), vec![]));
}

#[test]
fn a_second_writer_is_refused_and_a_stale_lock_is_taken() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let first = CheckpointWriter::open(root).unwrap();
    assert_eq!(first.stale_owner(), None);
    let error = CheckpointWriter::open(root).unwrap_err().to_string();
    let owner = format!("process {} on ", std::process::id());
    assert!(error.contains(&owner), "{error}");
    drop(first);
    let again = CheckpointWriter::open(root).unwrap();
    assert_eq!(again.stale_owner(), None, "the first ended in good order");
    drop(again);
    // What a killed process leaves: its name in the file, and no lock.
    fs::write(root.join(".lock"), "process 4711 on elsewhere\n").unwrap();
    let after_crash = CheckpointWriter::open(root).unwrap();
    assert_eq!(after_crash.stale_owner(), Some("process 4711 on elsewhere"));
}

#[test]
fn unusable_folders_are_passed_over_with_reasons() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    assert_eq!(found(&root.join("absent"), Check::Sizes), (None, vec![]));
    let mut writer = CheckpointWriter::open(root).unwrap();
    for step in [10, 20, 30, 40, 50] {
        writer.save(&state(step), files(step)).unwrap();
    }
    let at = |name: &str| root.join(name);
    fs::remove_file(at("step-00000050/manifest.json")).unwrap();
    fs::remove_file(at("step-00000040/unet/config.json")).unwrap();
    fs::rename(at("step-00000020"), at("step-00000035")).unwrap();
    fs::create_dir(at("step-00000060.tmp-77")).unwrap();
    for ignored in [
        "step-x",
        "step-",
        "step-+5",
        "step-00000070 (copy)",
        "other",
    ] {
        fs::create_dir(at(ignored)).unwrap();
    }

    let (step, skipped) = found(root, Check::Sizes);
    assert_eq!(step, Some(30));
    let expected = [
        (
            "step-00000060.tmp-77",
            "process 77 was stopped while saving it",
        ),
        ("step-00000050", "no manifest.json"),
        ("step-00000040", "unet/config.json: No such file"),
        (
            "step-00000035",
            "the state is of step 20, the checkpoint of step 35",
        ),
    ];
    assert_eq!(skipped.len(), expected.len(), "{skipped:?}");
    for (skipped, (name, reason)) in skipped.iter().zip(expected) {
        assert_eq!(skipped.path, at(name));
        assert!(skipped.reason.contains(reason), "{skipped:?}");
    }
}

#[test]
fn every_truncation_falls_back_to_the_checkpoint_before() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let mut writer = CheckpointWriter::open(root).unwrap();
    writer.save(&state(1), files(1)).unwrap();
    let dir = writer.save(&state(2), files(2)).unwrap();
    let saved = SavedCheckpoint::open(&dir).unwrap();
    for file in saved.files().chain([Manifest::FILE]) {
        let path = dir.join(file);
        let whole = fs::read(&path).unwrap();
        for part in 0..64 {
            fs::write(&path, &whole[..whole.len() * part / 64]).unwrap();
            let (step, skipped) = found(root, Check::Sizes);
            assert_eq!(step, Some(1), "{file} cut at {part}/64");
            assert!(skipped[0].reason.contains(file), "{skipped:?}");
        }
        fs::write(&path, &whole).unwrap();
    }
    assert_eq!(found(root, Check::Hashes), (Some(2), vec![]));
}

#[test]
fn every_flipped_bit_falls_back_to_the_checkpoint_before() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let mut writer = CheckpointWriter::open(root).unwrap();
    writer.save(&state(1), files(1)).unwrap();
    let dir = writer.save(&state(2), files(2)).unwrap();
    let saved = SavedCheckpoint::open(&dir).unwrap();
    for file in saved.files().chain([Manifest::FILE]) {
        let path = dir.join(file);
        let whole = fs::read(&path).unwrap();
        // A prime stride reaches every position of a byte, all over the file.
        for bit in (0..whole.len() * 8).step_by(37) {
            let mut damaged = whole.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, damaged).unwrap();
            let (step, skipped) = found(root, Check::Hashes);
            assert_eq!(step, Some(1), "{file} bit {bit}");
            assert!(skipped[0].reason.contains(file), "{skipped:?}");
        }
        fs::write(&path, &whole).unwrap();
    }
    assert_eq!(found(root, Check::Hashes), (Some(2), vec![]));
}

#[test]
fn a_run_goes_on_after_the_samples_that_it_has_had() {
    let of = |size: u64, count: u64| {
        BTreeMap::from([
            (BATCH_SIZE.to_owned(), json!(size)),
            (BATCHES_OF_STEP.to_owned(), json!(count)),
        ])
    };
    let mut saved = TrainState::new(10, of(4, 3));
    // A checkpoint without the count: 10 steps of 3 batches of 4.
    assert_eq!(saved.next_batch(&of(4, 1)), 30);
    assert_eq!(saved.next_batch(&of(7, 1)), 18);
    saved.data = json!({ BATCHES: 18 });
    assert_eq!(saved.next_batch(&of(4, 3)), 18);
    assert_eq!(saved.next_batch(&of(2, 3)), 36);
    assert!(saved.check_resume(&of(2, 1), &BTreeMap::new()).is_ok());
    let mut other = of(2, 1);
    other.insert("seed".to_owned(), json!(1));
    let mismatch = saved.check_resume(&other, &BTreeMap::new()).unwrap_err();
    assert_eq!(mismatch.fields.len(), 1);
    assert_eq!(mismatch.fields[0].key, "seed");
}
