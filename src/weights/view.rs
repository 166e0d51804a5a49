//! Checkpoints whose tensors have other names and are parts of the files' tensors.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::WeightsError;
use super::location::{Location, Made, Order};
use super::open::Checkpoint;
use super::shared_bytes::in_file;
use crate::models::original::Transform;

impl Checkpoint {
    /// The tensors of `map`, each with its new name, the name it has here, and what is shown of it.
    ///
    /// A view reads from the files when it is asked to, and only the bytes that it shows.
    ///
    /// # Errors
    /// When a tensor is not here, two get the same name, or one cannot be shown so.
    pub fn view(
        &self,
        map: impl IntoIterator<Item = (String, (String, Transform))>,
    ) -> Result<Checkpoint, WeightsError> {
        let error = |tensor: &str, reason: String| WeightsError::Tensor {
            path: self.path().to_owned(),
            tensor: tensor.to_owned(),
            reason,
        };
        let mut tensors = BTreeMap::new();
        for (name, (source, transform)) in map {
            let location = self
                .locate(&source)?
                .transformed(&transform)
                .map_err(|reason| error(&source, format!("cannot be read as {name}: {reason}")))?;
            if tensors.insert(name.clone(), location).is_some() {
                return Err(error(&source, format!("{name} stands for two tensors")));
            }
        }
        Ok(Checkpoint {
            opened: Arc::clone(&self.opened),
            tensors,
            quantization: None,
        })
    }
}

impl Checkpoint {
    /// The tensors as the files have them, where their weights are in this program's own layout for quantized ones: the bytes
    /// that input features share, `u8`, in place of the elements. What is read of it can be written into another file.
    pub fn as_in_files(&self) -> Checkpoint {
        let mut tensors = self.tensors.clone();
        for (name, location) in &mut tensors {
            let format = self.quantization().and_then(|own| own.format_of(name));
            let shape = format.and_then(|format| in_file(&location.shape, format));
            if let (Order::Shared(_), Some(shape)) = (location.order, shape) {
                location.shape = shape;
                location.order = Order::AsShown;
            }
        }
        Checkpoint {
            opened: Arc::clone(&self.opened),
            tensors,
            quantization: None,
        }
    }
}

impl Checkpoint {
    /// Shows the matrix `name` with zeros in columns after its own, so that there are `columns`.
    ///
    /// # Errors
    /// When there is no such tensor, or it is no matrix of fewer columns as the file has it.
    pub fn widen_columns(&mut self, name: &str, columns: usize) -> Result<(), WeightsError> {
        let path = self.path().to_owned();
        self.locate(name)?;
        let Some(location) = self.tensors.get_mut(name) else {
            return Ok(());
        };
        match (&mut location.shape.dims[..], location.order) {
            ([_, own], Order::AsShown) if *own < columns => {
                location.order = Order::ZeroColumns(*own);
                *own = columns;
                Ok(())
            }
            _ => Err(WeightsError::Tensor {
                path,
                tensor: name.to_owned(),
                reason: format!("{} cannot be shown with {columns} columns", location.shape),
            }),
        }
    }
}

impl Location {
    fn transformed(&self, transform: &Transform) -> Result<Location, String> {
        let mut result = self.clone();
        let Location { shape, .. } = self;
        let bits = shape.dtype.bits();
        match transform {
            Transform::Identity => {}
            // What is made here is not made of anything that could be shown otherwise.
            _ if self.order == Order::UnitMatrix => {
                return Err(format!("{shape} is a unit matrix, which no file holds"));
            }
            _ if matches!(
                self.order,
                Order::Shared(_)
                    | Order::HighFirst
                    | Order::Blocks(..)
                    | Order::Constant(_)
                    | Order::Times(_)
                    | Order::Words(_)
                    | Order::ZeroColumns(_)
                    | Order::Tiles(_)
            ) =>
            {
                return Err(format!("features of {shape} share bytes"));
            }
            Transform::SwapHalves if self.order == Order::HalvesSwapped => {
                result.order = Order::AsShown;
            }
            Transform::Transpose if self.order == Order::HalvesSwapped => {
                return Err(format!("the halves of {shape} are swapped already"));
            }
            Transform::Transpose => {
                let [rows, columns] = shape.dims[..] else {
                    return Err(format!("{shape} is no matrix"));
                };
                if !bits.is_multiple_of(8) {
                    return Err(format!("elements of {shape} share bytes"));
                }
                result.shape.dims = vec![columns, rows];
                result.order = match self.order {
                    Order::Transposed => Order::AsShown,
                    Order::AsShown
                    | Order::HalvesSwapped
                    | Order::UnitMatrix
                    | Order::Shared(_)
                    | Order::HighFirst
                    | Order::Blocks(..)
                    | Order::Constant(_)
                    | Order::Times(_)
                    | Order::Words(_)
                    | Order::ZeroColumns(_)
                    | Order::Tiles(_) => Order::Transposed,
                };
            }
            // Few tensors of the known layouts are stored in another order, and they are not cut: reading some rows
            // would mean reading all of it.
            Transform::Rows(_) | Transform::Reshape(_) | Transform::SwapHalves
                if self.order != Order::AsShown =>
            {
                return Err(format!(
                    "{shape} is transposed already, or its halves are swapped"
                ));
            }
            Transform::SwapHalves => {
                let rows = shape.dims.first().copied().unwrap_or(1);
                let half_bits = bits * shape.count() / 2;
                if !rows.is_multiple_of(2) || !half_bits.is_multiple_of(8) {
                    return Err(format!("{shape} has no halves of whole bytes"));
                }
                result.order = Order::HalvesSwapped;
            }
            Transform::Rows(rows) => {
                let Some((&count, row)) = shape.dims.split_first() else {
                    return Err(format!("{shape} has no rows"));
                };
                if rows.start > rows.end || rows.end > count {
                    return Err(format!("{shape} has no rows {}..{}", rows.start, rows.end));
                }
                let row_bits = bits * row.iter().product::<usize>();
                if !row_bits.is_multiple_of(8) {
                    return Err(format!("rows of {shape} share bytes"));
                }
                result.shape.dims[0] = rows.len();
                match self.made.as_deref() {
                    None => result.offset += (rows.start * (row_bits / 8)) as u64,
                    Some(Made::Weight(parts)) => {
                        result.made = Some(Arc::new(Made::Weight(Box::new(parts.rows(rows)?))));
                    }
                    Some(
                        Made::Beside(_) | Made::Product(_) | Made::Diagonal(_) | Made::Bias(_),
                    ) => return Err(format!("{shape} is computed, and is not cut")),
                }
            }
            Transform::UnitMatrix => {
                if !shape.dtype.is_float() {
                    return Err(format!("{shape} has no floats"));
                }
                result.shape.dims = vec![shape.count(); 2];
                result.order = Order::UnitMatrix;
                result.made = None;
            }
            Transform::Reshape(dims) => {
                let count = dims.iter().try_fold(1_usize, |n, &d| n.checked_mul(d));
                if count != Some(shape.count()) {
                    return Err(format!("{shape} does not have the elements of {dims:?}"));
                }
                result.shape.dims.clone_from(dims);
                if let Some(Made::Weight(parts)) = result.made.as_mut().map(Arc::make_mut) {
                    parts.codes.shape.dims.clone_from(dims);
                }
            }
        }
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::path::Path;

    use super::*;
    use crate::dtype::DType;
    use crate::weights::{TensorView, save};

    /// `a`: f32[4, 3] of 0, 1, ...; `b`: u8[2, 2, 2] of 0, 1, ...; `p`: f4[2, 3].
    fn checkpoint(dir: &Path) -> Checkpoint {
        let a: Vec<u8> = (0..12).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let b: Vec<u8> = (0..8).collect();
        let view = |name, dtype, dims, data| TensorView {
            name,
            dtype,
            dims,
            data,
        };
        let views = [
            view("a", DType::F32, &[4, 3], &a),
            view("b", DType::U8, &[2, 2, 2], &b),
            view("p", DType::F4E2M1Fn, &[2, 3], &[0x21, 0x43, 0x65]),
        ];
        let path = dir.join("model.safetensors");
        save(
            &path,
            views,
            &BTreeMap::from([("format".into(), "pt".into())]),
        )
        .unwrap();
        Checkpoint::open(&path).unwrap()
    }

    fn map(entries: &[(&str, &str, Transform)]) -> Vec<(String, (String, Transform))> {
        entries
            .iter()
            .map(|(new, old, t)| ((*new).into(), ((*old).into(), t.clone())))
            .collect()
    }

    #[test]
    fn shows_parts_under_other_names() {
        let dir = tempfile::tempdir().unwrap();
        let file = checkpoint(dir.path());
        let view = file
            .view(map(&[
                ("all", "a", Transform::Identity),
                ("middle", "a", Transform::Rows(1..3)),
                ("none", "a", Transform::Rows(4..4)),
                ("turned", "a", Transform::Transpose),
                ("flat", "a", Transform::Reshape(vec![2, 6])),
                ("swapped", "a", Transform::SwapHalves),
                ("unit", "a", Transform::UnitMatrix),
                ("last", "b", Transform::Rows(1..2)),
                ("column", "b", Transform::Reshape(vec![8, 1, 1])),
            ]))
            .unwrap();
        assert_eq!(
            view.iter()
                .map(|(n, s)| format!("{n} {s}"))
                .collect::<Vec<_>>(),
            [
                "all f32[4,3]",
                "column u8[8,1,1]",
                "flat f32[2,6]",
                "last u8[1,2,2]",
                "middle f32[2,3]",
                "none f32[0,3]",
                "swapped f32[4,3]",
                "turned f32[3,4]",
                "unit f32[12,12]",
            ]
        );
        assert_eq!(view.info("middle").unwrap().dims, [2, 3]);
        assert_eq!(view.metadata(), file.metadata());
        assert_eq!(view.path(), file.path());
        let values = |name: &str| {
            let tensor = view.read(name).unwrap();
            assert_eq!(&tensor.shape, view.info(name).unwrap());
            tensor.to_f32_vec().unwrap()
        };
        assert_eq!(values("all"), (0..12).map(|i| i as f32).collect::<Vec<_>>());
        assert_eq!(values("flat"), values("all"));
        assert_eq!(values("middle"), [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        assert_eq!(values("none"), [0.0; 0]);
        let turned = [0.0, 3.0, 6.0, 9.0, 1.0, 4.0, 7.0, 10.0, 2.0, 5.0, 8.0, 11.0];
        assert_eq!(values("turned"), turned);
        let swapped = [&values("all")[6..], &values("all")[..6]].concat();
        assert_eq!(values("swapped"), swapped);
        let unit: Vec<f32> = (0..144).map(|i| f32::from(i % 13 == 0)).collect();
        assert_eq!(values("unit"), unit);
        let cast = view.read_as("unit", DType::BF16).unwrap();
        assert_eq!(cast.to_f32_vec().unwrap(), unit);
        let cast = view.read_as("swapped", DType::BF16).unwrap();
        assert_eq!(cast.to_f32_vec().unwrap(), swapped);
        assert_eq!(view.read("last").unwrap().data, [4, 5, 6, 7]);
        let cast = view.read_as("turned", DType::BF16).unwrap();
        assert_eq!(cast.shape.to_string(), "bf16[3,4]");
        assert_eq!(cast.to_f32_vec().unwrap(), turned);
        let cast = view.read_as("middle", DType::F16).unwrap();
        assert_eq!(cast.to_f32_vec().unwrap(), values("middle"));
        let error = view.read("a").unwrap_err().to_string();
        assert!(error.contains("no tensor a"), "{error}");
    }

    #[test]
    fn views_of_views_add_up() {
        let dir = tempfile::tempdir().unwrap();
        let view = checkpoint(dir.path())
            .view(map(&[
                ("tail", "a", Transform::Rows(1..4)),
                ("turned", "a", Transform::Transpose),
            ]))
            .unwrap();
        let again = view
            .view(map(&[
                ("one", "tail", Transform::Rows(1..2)),
                ("back", "turned", Transform::Transpose),
                ("tail", "tail", Transform::Transpose),
            ]))
            .unwrap();
        assert_eq!(
            again.read("one").unwrap().to_f32_vec().unwrap(),
            [6.0, 7.0, 8.0]
        );
        assert_eq!(again.info("back").unwrap().dims, [4, 3]);
        assert_eq!(again.read("back").unwrap(), view_all(dir.path()));
        let tail = again.read("tail").unwrap().to_f32_vec().unwrap();
        assert_eq!(tail, [3.0, 6.0, 9.0, 4.0, 7.0, 10.0, 5.0, 8.0, 11.0]);
    }

    fn view_all(dir: &Path) -> crate::host_tensor::HostTensor {
        checkpoint(dir).read("a").unwrap()
    }

    #[test]
    fn what_cannot_be_shown_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = checkpoint(dir.path());
        let error =
            |entries: &[(&str, &str, Transform)]| file.view(map(entries)).unwrap_err().to_string();
        for (source, transform, expected) in [
            ("a", Transform::Rows(0..5), "f32[4,3] has no rows 0..5"),
            ("b", Transform::Transpose, "u8[2,2,2] is no matrix"),
            ("b", Transform::UnitMatrix, "u8[2,2,2] has no floats"),
            ("p", Transform::SwapHalves, "has no halves of whole bytes"),
            (
                "a",
                Transform::Reshape(vec![5]),
                "f32[4,3] does not have the elements of [5]",
            ),
            (
                "a",
                Transform::Reshape(vec![usize::MAX, 2]),
                "does not have the elements",
            ),
            ("p", Transform::Rows(0..1), "share bytes"),
            ("p", Transform::Transpose, "share bytes"),
            ("aa", Transform::Identity, "no tensor aa"),
        ] {
            let found = error(&[("new", source, transform)]);
            assert!(found.contains(expected), "{found}");
        }
        let reversed = Range { start: 3, end: 2 };
        assert!(error(&[("new", "a", Transform::Rows(reversed))]).contains("no rows 3..2"));
        let twice = error(&[
            ("x", "a", Transform::Identity),
            ("x", "b", Transform::Identity),
        ]);
        assert!(
            twice.ends_with("tensor b: x stands for two tensors"),
            "{twice}"
        );
        let view = file.view(map(&[("t", "a", Transform::Transpose)])).unwrap();
        let cut = view
            .view(map(&[("x", "t", Transform::Rows(0..1))]))
            .unwrap_err()
            .to_string();
        assert!(cut.contains("transposed already"), "{cut}");
    }
}
