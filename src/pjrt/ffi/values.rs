//! Text, lists and named values across the boundary.

use std::collections::BTreeMap;
use std::ffi::c_char;

use super::types::*;
use crate::pjrt::values::NamedValue;

/// A copy of `len` elements at `data`; empty when there are none, whatever the pointer.
///
/// # Safety
/// `data` points to `len` initialized elements, or `len` is 0.
pub unsafe fn copied<T: Copy>(data: *const T, len: usize) -> Vec<T> {
    if len == 0 || data.is_null() {
        return Vec::new();
    }
    // SAFETY: not null, and the caller says that `len` elements are there.
    unsafe { std::slice::from_raw_parts(data, len) }.to_vec()
}

/// A copy of `len` bytes of text; bytes that are not UTF-8 are replaced.
///
/// # Safety
/// As [`copied`].
pub unsafe fn text(data: *const c_char, len: usize) -> String {
    // SAFETY: the caller's promise is the same.
    let bytes = unsafe { copied(data.cast::<u8>(), len) };
    String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

/// A copy of a list of named values. Kinds of a newer interface are left out.
///
/// # Safety
/// `values` points to `len` named values whose text and lists are alive, or `len` is 0.
pub unsafe fn named_values(
    values: *const PJRT_NamedValue,
    len: usize,
) -> BTreeMap<String, NamedValue> {
    // SAFETY: the caller's promise. The kind of a value says which field of the union is set, and
    // `value_size` the length of text and lists.
    unsafe {
        copied(values, len)
            .into_iter()
            .filter_map(|raw| {
                let value = match raw.r#type {
                    NAMED_VALUE_STRING => {
                        NamedValue::String(text(raw.value.string_value, raw.value_size))
                    }
                    NAMED_VALUE_INT64 => NamedValue::Int64(raw.value.int64_value),
                    NAMED_VALUE_INT64_LIST => {
                        NamedValue::Int64List(copied(raw.value.int64_array_value, raw.value_size))
                    }
                    NAMED_VALUE_FLOAT => NamedValue::Float(raw.value.float_value),
                    NAMED_VALUE_BOOL => NamedValue::Bool(raw.value.bool_value),
                    _ => return None,
                };
                Some((text(raw.name, raw.name_size), value))
            })
            .collect()
    }
}

/// The options as the C side reads them. The result points into `options`.
pub fn raw_named_values(options: &[(String, NamedValue)]) -> Vec<PJRT_NamedValue> {
    options
        .iter()
        .map(|(name, value)| {
            let (kind, raw, size) = match value {
                NamedValue::String(text) => (
                    NAMED_VALUE_STRING,
                    PJRT_NamedValue_Value {
                        string_value: text.as_ptr().cast(),
                    },
                    text.len(),
                ),
                NamedValue::Int64(number) => (
                    NAMED_VALUE_INT64,
                    PJRT_NamedValue_Value {
                        int64_value: *number,
                    },
                    1,
                ),
                NamedValue::Int64List(list) => (
                    NAMED_VALUE_INT64_LIST,
                    PJRT_NamedValue_Value {
                        int64_array_value: list.as_ptr(),
                    },
                    list.len(),
                ),
                NamedValue::Float(number) => (
                    NAMED_VALUE_FLOAT,
                    PJRT_NamedValue_Value {
                        float_value: *number,
                    },
                    1,
                ),
                NamedValue::Bool(flag) => (
                    NAMED_VALUE_BOOL,
                    PJRT_NamedValue_Value { bool_value: *flag },
                    1,
                ),
            };
            PJRT_NamedValue {
                name: name.as_ptr().cast(),
                name_size: name.len(),
                r#type: kind,
                value: raw,
                value_size: size,
                ..PJRT_NamedValue::new()
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_values_come_back_as_they_went() {
        let options = vec![
            (
                "name".to_string(),
                NamedValue::String("v5e:2x2".to_string()),
            ),
            ("slices".to_string(), NamedValue::Int64(-2)),
            ("wrap".to_string(), NamedValue::Int64List(vec![1, 0, 1])),
            ("fraction".to_string(), NamedValue::Float(0.75)),
            ("preallocate".to_string(), NamedValue::Bool(true)),
            ("empty".to_string(), NamedValue::Int64List(vec![])),
        ];
        let raw = raw_named_values(&options);
        // SAFETY: `raw` points into `options`, which is alive.
        let back = unsafe { named_values(raw.as_ptr(), raw.len()) };
        assert_eq!(back, options.into_iter().collect());
    }

    #[test]
    fn nothing_is_read_through_a_null_pointer() {
        // SAFETY: the length is 0.
        unsafe {
            assert_eq!(text(std::ptr::null(), 0), "");
            assert!(named_values(std::ptr::null(), 0).is_empty());
        }
    }
}
