//! Comparing a checkpoint's tensors with what a model declares.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use super::open::Checkpoint;
use crate::dtype::DType;
use crate::util::names::nearest;

/// How many tensors of each kind an error shows.
const SHOWN: usize = 20;

/// Tensors that `transformers` used to save although they are no parameters: the positions
/// `0..n` of a text encoder's embedding.
const NOT_PARAMETERS: [&str; 1] = ["embeddings.position_ids"];

/// Whether a tensor of this name is a parameter.
pub(super) fn is_parameter(name: &str) -> bool {
    !NOT_PARAMETERS.iter().any(|other| name.ends_with(other))
}

/// A parameter that the checkpoint lacks.
#[derive(Clone, Debug, PartialEq)]
pub struct MissingTensor {
    pub name: String,
    pub dims: Vec<usize>,
    /// The most similar name among the tensors that the model does not know.
    pub nearest: Option<String>,
}

/// A parameter with other dimensions in the checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Misshapen {
    pub name: String,
    pub expected: Vec<usize>,
    pub found: Vec<usize>,
}

/// Every difference between a model's parameters and a checkpoint's tensors, each list sorted by
/// name.
#[derive(Clone, Debug, PartialEq)]
pub struct MismatchError {
    pub checkpoint: PathBuf,
    pub missing: Vec<MissingTensor>,
    pub extra: Vec<(String, Vec<usize>)>,
    pub misshapen: Vec<Misshapen>,
    /// Parameters that are stored as something else than floating-point numbers, and what.
    pub not_float: Vec<(String, DType)>,
}

impl std::error::Error for MismatchError {}

impl fmt::Display for MismatchError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(
            f,
            "{}: does not fit the model: {} missing, {} extra, {} of another shape",
            self.checkpoint.display(),
            self.missing.len(),
            self.extra.len(),
            self.misshapen.len()
        )?;
        if !self.not_float.is_empty() {
            write!(f, ", {} of another type", self.not_float.len())?;
        }
        for tensor in self.missing.iter().take(SHOWN) {
            write!(f, "\n  missing: {} {:?}", tensor.name, tensor.dims)?;
            if let Some(nearest) = &tensor.nearest {
                write!(f, " (the checkpoint has {nearest})")?;
            }
        }
        more(f, self.missing.len(), "missing")?;
        for (name, dims) in self.extra.iter().take(SHOWN) {
            write!(f, "\n  extra: {name} {dims:?}")?;
        }
        more(f, self.extra.len(), "extra")?;
        for tensor in self.misshapen.iter().take(SHOWN) {
            write!(
                f,
                "\n  shape: {} expected {:?}, found {:?}",
                tensor.name, tensor.expected, tensor.found
            )?;
        }
        more(f, self.misshapen.len(), "of another shape")?;
        for (name, dtype) in self.not_float.iter().take(SHOWN) {
            write!(
                f,
                "\n  type: {name} expected floating-point numbers, found {dtype}"
            )?;
        }
        more(f, self.not_float.len(), "of another type")
    }
}

fn more(f: &mut fmt::Formatter, count: usize, kind: &str) -> fmt::Result {
    match count.checked_sub(SHOWN) {
        None | Some(0) => Ok(()),
        Some(rest) => write!(f, "\n  ... and {rest} more {kind}"),
    }
}

/// Compares `expected`, a model's parameter paths and dimensions, with the tensors of a checkpoint.
/// Types of floating-point numbers may differ: they are cast when read. Weights that the checkpoint describes as
/// quantized are integers with scales beside them.
///
/// # Errors
/// Lists every tensor that is missing, extra, of another shape or of no floating-point numbers.
pub fn match_parameters(
    expected: &[(impl AsRef<str>, impl AsRef<[usize]>)],
    checkpoint: &Checkpoint,
) -> Result<(), MismatchError> {
    let quantization = checkpoint.quantization();
    let found: BTreeMap<&str, &[usize]> = checkpoint
        .iter()
        .map(|(name, shape)| (name, shape.dims.as_slice()))
        .collect();
    let expected: BTreeMap<&str, &[usize]> = expected
        .iter()
        .map(|(name, dims)| (name.as_ref(), dims.as_ref()))
        .collect();

    let extra: Vec<(String, Vec<usize>)> = found
        .iter()
        .filter(|(name, _)| !expected.contains_key(*name))
        .filter(|(name, _)| is_parameter(name) && !quantization.is_some_and(|q| q.is_beside(name)))
        .map(|(name, dims)| ((*name).to_owned(), dims.to_vec()))
        .collect();
    let mut missing = Vec::new();
    let mut misshapen = Vec::new();
    for (name, dims) in &expected {
        let (name, dims) = (*name, *dims);
        match found.get(name) {
            None => missing.push(MissingTensor {
                name: name.to_owned(),
                dims: dims.to_vec(),
                // The search is quadratic, so only for what is shown.
                nearest: (missing.len() < SHOWN)
                    .then(|| nearest(name, extra.iter().map(|(n, _)| n.as_str())))
                    .flatten(),
            }),
            Some(&found) if found != dims => misshapen.push(Misshapen {
                name: name.to_owned(),
                expected: dims.to_vec(),
                found: found.to_vec(),
            }),
            Some(_) => {}
        }
    }
    let not_float: Vec<(String, DType)> = checkpoint
        .iter()
        .filter(|(name, shape)| expected.contains_key(name) && !shape.dtype.is_float())
        .filter(|(name, _)| quantization.is_none_or(|q| q.format_of(name).is_none()))
        .map(|(name, shape)| (name.to_owned(), shape.dtype))
        .collect();
    if missing.is_empty() && extra.is_empty() && misshapen.is_empty() && not_float.is_empty() {
        return Ok(());
    }
    Err(MismatchError {
        checkpoint: checkpoint.path().to_owned(),
        missing,
        extra,
        misshapen,
        not_float,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::weights::{TensorView, save};

    fn checkpoint(dir: &std::path::Path, tensors: &[(&str, &[usize])]) -> Checkpoint {
        let path = dir.join("model.safetensors");
        let zeros = vec![0; 4096];
        let views = tensors.iter().map(|&(name, dims)| TensorView {
            name,
            dtype: DType::F16,
            dims,
            data: &zeros[..2 * dims.iter().product::<usize>()],
        });
        save(&path, views, &BTreeMap::new()).unwrap();
        Checkpoint::open(&path).unwrap()
    }

    #[test]
    fn a_fitting_checkpoint_passes_whatever_its_element_type() {
        let dir = tempfile::tempdir().unwrap();
        let c = checkpoint(
            dir.path(),
            &[
                ("conv_in.weight", &[4, 3, 3, 3]),
                ("text_model.embeddings.position_ids", &[1, 77]),
            ],
        );
        assert_eq!(
            match_parameters(&[("conv_in.weight", [4, 3, 3, 3])], &c),
            Ok(())
        );
    }

    #[test]
    fn integers_are_no_weights() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        let view = TensorView {
            name: "conv_in.weight",
            dtype: DType::S8,
            dims: &[2],
            data: &[1, 2],
        };
        save(&path, [view], &BTreeMap::new()).unwrap();
        let file = Checkpoint::open(&path).unwrap();
        let error = match_parameters(&[("conv_in.weight", [2])], &file).unwrap_err();
        let expected = "0 missing, 0 extra, 0 of another shape, 1 of another type\
                        \n  type: conv_in.weight expected floating-point numbers, found s8";
        assert!(error.to_string().ends_with(expected), "{error}");
    }

    #[test]
    fn all_differences_are_listed_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let c = checkpoint(
            dir.path(),
            &[
                ("down_blocks.0.attn.proj_in.weight", &[8, 8, 1, 1]),
                ("down_blocks.0.attn.to_q.wieght", &[8, 8]),
                ("zzz", &[2]),
                ("mid.weight", &[3]),
            ],
        );
        let expected: [(&str, &[usize]); 4] = [
            ("down_blocks.0.attn.to_q.weight", &[8, 8]),
            ("down_blocks.0.attn.proj_in.weight", &[8, 8]),
            ("bias_of_something_else", &[1]),
            ("mid.weight", &[3]),
        ];
        let error = match_parameters(&expected, &c).unwrap_err();
        let text = error.to_string();
        let body = text.split_once(": does").unwrap().1;
        assert_eq!(
            body,
            " not fit the model: 2 missing, 2 extra, 1 of another shape\
             \n  missing: bias_of_something_else [1]\
             \n  missing: down_blocks.0.attn.to_q.weight [8, 8] \
             (the checkpoint has down_blocks.0.attn.to_q.wieght)\
             \n  extra: down_blocks.0.attn.to_q.wieght [8, 8]\
             \n  extra: zzz [2]\
             \n  shape: down_blocks.0.attn.proj_in.weight expected [8, 8], found [8, 8, 1, 1]"
        );
    }

    #[test]
    fn long_lists_are_cut_but_counted() {
        let dir = tempfile::tempdir().unwrap();
        let c = checkpoint(dir.path(), &[]);
        let expected: Vec<(String, Vec<usize>)> =
            (0..45).map(|i| (format!("p{i:02}"), vec![i])).collect();
        let error = match_parameters(&expected, &c).unwrap_err();
        assert_eq!(error.missing.len(), 45);
        let text = error.to_string();
        assert!(text.contains("45 missing, 0 extra"), "{text}");
        assert!(text.contains("p19") && !text.contains("p20"), "{text}");
        assert!(text.ends_with("... and 25 more missing"), "{text}");
    }
}
