//! Recorded vectors under `tests/golden`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use maxdiff::dtype::DType;
use maxdiff::host_tensor::HostTensor;
use maxdiff::shape::Shape;
use safetensors::{Dtype, SafeTensors};

/// The tensors of one or several safetensors files.
pub struct Golden {
    tensors: BTreeMap<String, (Shape, Vec<f64>)>,
    /// The JSON object of the file's metadata; null where there is none.
    pub meta: serde_json::Value,
}

/// The file or folder `tests/golden/name`.
pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name)
}

impl Golden {
    /// Reads `tests/golden/name`.
    pub fn read(name: &str) -> Self {
        let bytes =
            std::fs::read(golden(name)).unwrap_or_else(|e| panic!("tests/golden/{name}: {e}"));
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let meta = header
            .metadata()
            .as_ref()
            .and_then(|m| m.get("golden"))
            .map_or(serde_json::Value::Null, |text| {
                serde_json::from_str(text).unwrap()
            });
        let tensors = SafeTensors::deserialize(&bytes)
            .unwrap()
            .iter()
            .map(|(name, view)| {
                let dtype = match view.dtype() {
                    Dtype::BOOL => DType::Pred,
                    Dtype::I8 => DType::S8,
                    Dtype::U8 => DType::U8,
                    Dtype::I32 => DType::S32,
                    Dtype::I64 => DType::S64,
                    Dtype::F16 => DType::F16,
                    Dtype::BF16 => DType::BF16,
                    Dtype::F32 => DType::F32,
                    Dtype::F64 => DType::F64,
                    other => panic!("{name}: {other:?} is not expected here"),
                };
                let shape = Shape::new(dtype, view.shape());
                let values = HostTensor::new(shape.clone(), view.data().to_vec())
                    .unwrap()
                    .to_f64_vec()
                    .unwrap();
                (name.to_string(), (shape, values))
            })
            .collect();
        Golden { tensors, meta }
    }

    /// Reads every safetensors file of a folder whose name starts with `prefix`.
    pub fn read_folder(folder: &str, prefix: &str) -> Self {
        let mut all = Golden {
            tensors: BTreeMap::new(),
            meta: serde_json::Value::Null,
        };
        for entry in std::fs::read_dir(golden(folder)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if name.starts_with(prefix) && name.ends_with(".safetensors") {
                all.tensors
                    .extend(Golden::read(&format!("{folder}/{name}")).tensors);
            }
        }
        assert!(
            !all.tensors.is_empty(),
            "no {prefix}*.safetensors in {folder}"
        );
        all
    }

    /// The text of `tests/golden/name`.
    pub fn text(name: &str) -> String {
        std::fs::read_to_string(golden(name)).unwrap_or_else(|e| panic!("tests/golden/{name}: {e}"))
    }

    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    pub fn dims(&self, name: &str) -> Vec<usize> {
        self.get(name).0.dims.clone()
    }

    pub fn dtype(&self, name: &str) -> DType {
        self.get(name).0.dtype
    }

    pub fn values(&self, name: &str) -> &[f64] {
        &self.get(name).1
    }

    /// Names and sizes, sorted by name.
    pub fn shapes(&self) -> Vec<(String, Vec<usize>)> {
        self.tensors
            .iter()
            .map(|(name, (shape, _))| (name.clone(), shape.dims.clone()))
            .collect()
    }

    /// A tensor converted to `shape`'s type; its sizes must be `shape`'s.
    pub fn tensor(&self, name: &str, shape: &Shape) -> HostTensor {
        let (recorded, values) = self.get(name);
        assert_eq!(recorded.dims, shape.dims, "{name}");
        HostTensor::from_f64(shape.clone(), values).unwrap()
    }

    fn get(&self, name: &str) -> &(Shape, Vec<f64>) {
        self.tensors
            .get(name)
            .unwrap_or_else(|| panic!("no {name} among the recorded tensors"))
    }
}

/// `|found - recorded| / |recorded|`, or `|found|` where the recorded tensor is zero.
pub fn rel_l2(found: &HostTensor, golden: &Golden, name: &str) -> f64 {
    assert_eq!(found.shape.dims, golden.dims(name), "{name}");
    assert_eq!(found.shape.dtype, DType::F32, "{name}");
    distance(&found.to_f64_vec().unwrap(), golden.values(name))
}

/// `|found - expected| / |expected|`, or `|found|` where `expected` is zero.
pub fn distance(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let error = norm(&mut found.iter().zip(expected).map(|(f, e)| f - e));
    let size = norm(&mut expected.iter().copied());
    if size == 0.0 { error } else { error / size }
}

/// Asserts that [`rel_l2`] is at most `tolerance`.
pub fn assert_close(name: &str, found: &HostTensor, golden: &Golden, tolerance: f64) {
    let error = rel_l2(found, golden, name);
    assert!(
        error <= tolerance,
        "{name}: relative L2 error {error:e} above {tolerance:e}"
    );
}
