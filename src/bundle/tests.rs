use super::frame::{VERSION, decode, encode};
use super::*;

fn header() -> Header {
    Header {
        plugin: PluginId {
            platform: "tpu".to_owned(),
            version: "0.0.51".to_owned(),
            build: "a build".to_owned(),
            sha256: "00".repeat(32),
        },
        target: Target {
            name: "v5e-4".to_owned(),
            num_slices: 2,
            mesh: BTreeMap::from([("data".to_owned(), 8)]),
            device_assignment: vec![100000, 100001],
        },
        programs: vec![program()],
    }
}

fn program() -> ProgramHeader {
    ProgramHeader {
        stage: Stage::Step,
        payload: PayloadKind::Executable,
        payload_bytes: 256,
        groups: vec![],
        program: ProgramId {
            step: "train".to_owned(),
            stablehlo_sha256: "11".repeat(32),
            compile_options_sha256: "22".repeat(32),
            flags: BTreeMap::new(),
            weights_dtype: "float32".to_owned(),
            activations_dtype: "bfloat16".to_owned(),
            precision: "DEFAULT".to_owned(),
            quantization: "int8".to_owned(),
        },
        inputs: vec![Slot {
            name: "unet/conv_in.weight".to_owned(),
            dtype: "f32".to_owned(),
            dims: vec![8, 4, 3, 3],
            sharding: vec![vec!["fsdp".to_owned()], vec![], vec![], vec![]],
            alias: Some(0),
        }],
        outputs: vec![],
        memory: Memory::default(),
    }
}

fn bundle() -> Bundle {
    Bundle {
        header: header(),
        payload: (0..=255).collect(),
    }
}

#[test]
fn what_is_written_is_read_and_nothing_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new/step.bundle");
    bundle().write(&path).unwrap();
    let read = Bundle::read(&path).unwrap();
    assert_eq!(read, bundle());
    read.check(&path, &header()).unwrap();

    let other = Bundle {
        payload: vec![1; 256],
        ..bundle()
    };
    let error = other.write(&path).unwrap_err();
    assert!(matches!(error, BundleError::Exists { .. }), "{error}");
    let error = check_writable(&path).unwrap_err();
    assert!(matches!(error, BundleError::Exists { .. }), "{error}");
    assert_eq!(Bundle::read(&path).unwrap(), bundle());
    let names: Vec<_> = std::fs::read_dir(path.parent().unwrap())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(names, ["step.bundle"], "no unfinished file is left");
}

#[test]
fn what_a_killed_process_left_behind_is_in_nobodys_way() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step.bundle");
    let left = [".step.bundle.a1b2c3.partial", ".step.bundle.d4e5f6.partial"];
    for name in left {
        std::fs::write(folder.path().join(name), "unfinished").unwrap();
    }
    check_writable(&path).unwrap();
    bundle().write(&path).unwrap();
    assert_eq!(Bundle::read(&path).unwrap(), bundle());
    for name in left {
        let text = std::fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!(text, "unfinished", "{name} may be another container's");
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_found_beforehand() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = check_writable(&file.join("step.bundle")).unwrap_err();
    assert!(matches!(error, BundleError::Io { .. }), "{error}");
    let fine = folder.path().join("step.bundle");
    check_writable(&fine).unwrap();
    assert!(!fine.exists(), "the check leaves nothing behind");
}

#[test]
fn every_truncation_is_refused() {
    let bytes = encode(&header(), &bundle().payload);
    assert_eq!(decode(&bytes).unwrap(), bundle());
    for length in 0..bytes.len() {
        let error = decode(&bytes[..length]).unwrap_err();
        assert!(
            matches!(error, FrameError::Truncated { .. }),
            "{length}: {error}"
        );
    }
    let longer = [bytes.as_slice(), &[0]].concat();
    assert!(matches!(
        decode(&longer).unwrap_err(),
        FrameError::Trailing { extra: 1 }
    ));
}

#[test]
fn every_flipped_bit_is_found() {
    let bytes = encode(&header(), &bundle().payload);
    for bit in 0..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        let error = decode(&damaged).unwrap_err();
        let as_expected = match bit / 8 {
            0..8 => matches!(error, FrameError::Magic),
            8..12 => matches!(error, FrameError::Version { .. }),
            12..28 => matches!(
                error,
                FrameError::Truncated { .. } | FrameError::Trailing { .. }
            ),
            _ => matches!(error, FrameError::Digest { .. }),
        };
        assert!(as_expected, "bit {bit}: {error}");
    }
}

#[test]
fn lengths_that_overflow_are_refused() {
    let mut bytes = encode(&header(), &[]);
    bytes[12..28].fill(0xff);
    assert!(matches!(
        decode(&bytes).unwrap_err(),
        FrameError::Truncated {
            expected: u64::MAX,
            ..
        }
    ));
}

#[test]
fn a_whole_bundle_of_another_version_or_header_is_refused() {
    let bytes = encode(&header(), &[]);
    let mut newer = bytes.clone();
    newer[8..12].copy_from_slice(&(VERSION + 1).to_le_bytes());
    assert_eq!(
        decode(&newer).unwrap_err().to_string(),
        "bundle of version 3; this program reads version 2"
    );
    // A valid digest over a header that is none.
    use crate::util::hash::Sha256;
    let mut strange = bytes[..12].to_vec();
    strange.extend(2u64.to_le_bytes());
    strange.extend(0u64.to_le_bytes());
    strange.extend(b"{}");
    let digest = Sha256::of(&strange);
    strange.extend(digest.bytes());
    let error = decode(&strange).unwrap_err();
    assert!(matches!(error, FrameError::Header(_)), "{error}");
    assert!(error.to_string().contains("plugin"), "{error}");
}

#[test]
fn the_fields_that_differ_are_named() {
    let mut expected = header();
    expected.plugin.version = "0.0.52".to_owned();
    expected.target.device_assignment = vec![0, 1];
    expected.programs[0].inputs[0].dims = vec![8, 3, 3, 3];
    expected.programs[0].memory.temp = 1;
    let error = bundle()
        .check(Path::new("step.bundle"), &expected)
        .unwrap_err()
        .to_string();
    assert_eq!(
        error,
        "step.bundle cannot be used here: plugin.version is \"0.0.51\", expected \"0.0.52\"; \
         target.device_assignment is [100000,100001], expected [0,1]; \
         programs.0.inputs.0.dims is [8,4,3,3], expected [8,3,3,3]"
    );
}
