//! Reading tensors, in parallel within one and across many.

use std::collections::VecDeque;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, sync_channel};

use rayon::prelude::*;

use super::location::{Location, Order, Words};
use super::open::{Checkpoint, io};
use super::shared_bytes::of_file_order;
use super::{WeightsError, cast};
use crate::dtype::DType;
use crate::host_tensor::{HostTensor, packed};
use crate::shape::Shape;

/// Bytes that one thread reads at a time.
const READ_CHUNK: usize = 8 << 20;
/// Elements that one thread reads and casts at a time: they stay in the second cache.
const CAST_CHUNK: usize = 128 << 10;
/// Bytes of tensors for each thread that are read before [`Checkpoint::read_all_with`]'s consumer has asked for them.
const AHEAD: usize = 32 << 20;
/// Memory below this size is not worth keeping.
const SMALLEST_KEPT: usize = 256 << 10;

impl Checkpoint {
    /// Reads a tensor; a large one with several threads.
    ///
    /// # Errors
    /// When there is no such tensor or the file cannot be read.
    pub fn read(&self, name: &str) -> Result<HostTensor, WeightsError> {
        let location = self.locate(name)?;
        self.read_into(location, Vec::new())
    }

    /// Reads a tensor of finite numbers and casts it (see [`super::cast`]). Between the usual float types nothing but
    /// the result is held in memory.
    ///
    /// # Errors
    /// As [`Checkpoint::read`], when a value is NaN or infinite, and when there is no conversion to `dtype`.
    pub fn read_as(&self, name: &str, dtype: DType) -> Result<HostTensor, WeightsError> {
        self.read_as_into(name, dtype, Vec::new())
    }

    /// Reads and casts many tensors in parallel and shows them to `consume` on the calling thread, in
    /// the order of `wanted`; it may change them.
    ///
    /// While `consume` works, the next tensors are read: 32 MiB of them for each thread of rayon's pool, and at
    /// least one. Their memory is used again, as fresh memory costs more than the reading.
    ///
    /// # Errors
    /// As [`Checkpoint::read_as`], and errors of `consume`; both end the reading.
    pub fn read_all_with<E: From<WeightsError>>(
        &self,
        wanted: &[(impl AsRef<str> + Sync, DType)],
        mut consume: impl FnMut(&str, &mut HostTensor) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut sizes = Vec::with_capacity(wanted.len());
        for (name, dtype) in wanted {
            let shape = &self.locate(name.as_ref())?.shape;
            sizes.push(shape.with_dtype(*dtype).bytes());
        }
        if rayon::current_thread_index().is_some() {
            // Waiting here for others of the same pool could wait forever.
            for (name, dtype) in wanted {
                consume(name.as_ref(), &mut self.read_as(name.as_ref(), *dtype)?)?;
            }
            return Ok(());
        }
        let limit = AHEAD * rayon::current_num_threads();
        let mut upcoming = wanted.iter().zip(&sizes).peekable();
        let mut ahead: VecDeque<Receiver<Result<HostTensor, WeightsError>>> = VecDeque::new();
        let mut bytes = 0;
        let mut memory = Memory {
            limit,
            ..Memory::default()
        };
        rayon::in_place_scope_fifo(|scope| {
            for ((name, _), size) in wanted.iter().zip(&sizes) {
                while let Some(((name, dtype), size)) =
                    upcoming.next_if(|(_, size)| ahead.is_empty() || bytes + **size <= limit)
                {
                    let (sender, receiver) = sync_channel(1);
                    let buffer = memory.take(*size);
                    scope.spawn_fifo(move |_| {
                        // Nobody waits for it any more after an error.
                        let _ = sender.send(self.read_as_into(name.as_ref(), *dtype, buffer));
                    });
                    ahead.push_back(receiver);
                    bytes += size;
                }
                let Some(Ok(tensor)) = ahead.pop_front().map(|next| next.recv()) else {
                    // The reader panicked, and the scope passes that on.
                    return Ok(());
                };
                bytes -= size;
                let mut tensor = tensor?;
                consume(name.as_ref(), &mut tensor)?;
                memory.give(tensor.data);
            }
            Ok(())
        })
    }

    /// Reads what lies at a place, as it is shown.
    pub(super) fn read_location(&self, location: &Location) -> Result<HostTensor, WeightsError> {
        self.read_into(location, Vec::new())
    }

    /// Reads a tensor as it is into `buffer`, or into new memory where it does not fit.
    fn read_into(&self, location: &Location, buffer: Vec<u8>) -> Result<HostTensor, WeightsError> {
        if location.order == Order::UnitMatrix {
            return unit_matrix(&location.shape);
        }
        if let Order::Constant(bits) = location.order {
            let values = vec![f32::from_bits(bits); location.shape.count()];
            let data = bytemuck::cast_slice(&values).to_vec();
            let shape = location.shape.clone();
            return Ok(HostTensor { shape, data });
        }
        if let Some(made) = location.made.as_deref() {
            let tensor = self.read_made(made, &location.shape)?;
            return Ok(in_order(location, tensor.data));
        }
        let mut data = sized(buffer, stored_bytes(location));
        if data.len() <= READ_CHUNK {
            self.read_range(location, 0, &mut data)?;
        } else {
            data.par_chunks_mut(READ_CHUNK)
                .enumerate()
                .try_for_each(|(i, chunk)| self.read_range(location, i * READ_CHUNK, chunk))?;
        }
        Ok(in_order(location, data))
    }

    fn read_as_into(
        &self,
        name: &str,
        dtype: DType,
        buffer: Vec<u8>,
    ) -> Result<HostTensor, WeightsError> {
        let location = self.locate(name)?;
        let from = location.shape.dtype;
        if let Some(parts) = location.parts()
            && location.order == Order::AsShown
        {
            let mut tensor = self.read_parts(name, parts, dtype, |bytes| {
                self.check_finite(name, location, bytes)
            })?;
            tensor.shape.dims.clone_from(&location.shape.dims);
            return Ok(tensor);
        }
        let is_stored = location.made.is_none() && location.order == Order::AsShown;
        if from == dtype || !is_stored || !cast::is_direct(from, dtype) {
            let tensor = self.read_into(location, buffer)?;
            tensor
                .data
                .par_chunks(READ_CHUNK)
                .try_for_each(|bytes| self.check_finite(name, location, bytes))?;
            return cast::cast(tensor, dtype).map_err(|source| WeightsError::Cast {
                name: name.to_owned(),
                source,
            });
        }
        let shape = location.shape.with_dtype(dtype);
        let mut data = sized(buffer, shape.bytes());
        let read = |stored: &mut Vec<u8>, i: usize, out: &mut [u8]| {
            stored.resize(from.storage_bytes(out.len() / dtype.storage_bytes(1)), 0);
            self.read_range(location, i * from.storage_bytes(CAST_CHUNK), stored)?;
            self.check_finite(name, location, stored)?;
            cast::cast_bytes(from, stored, dtype, out);
            Ok::<_, WeightsError>(())
        };
        let chunk = dtype.storage_bytes(CAST_CHUNK);
        if data.len() <= chunk {
            read(&mut Vec::new(), 0, &mut data)?;
        } else {
            data.par_chunks_mut(chunk)
                .enumerate()
                .try_for_each_init(Vec::new, |stored, (i, out)| read(stored, i, out))?;
        }
        Ok(HostTensor { shape, data })
    }

    /// Refuses values of a tensor that are NaN or infinite: everything that is computed with them would be.
    fn check_finite(
        &self,
        name: &str,
        location: &Location,
        bytes: &[u8],
    ) -> Result<(), WeightsError> {
        if is_finite(location.shape.dtype, bytes) {
            return Ok(());
        }
        let (path, _) = &self.opened.files[location.file];
        Err(WeightsError::Tensor {
            path: path.clone(),
            tensor: name.to_owned(),
            reason: "it holds NaN or infinity, so it was damaged or made wrongly; download the file again, or take another"
                .to_owned(),
        })
    }

    /// Reads bytes of a tensor from `start`, counted from its first.
    fn read_range(
        &self,
        location: &Location,
        start: usize,
        out: &mut [u8],
    ) -> Result<(), WeightsError> {
        let (path, file) = &self.opened.files[location.file];
        file.read_exact_at(out, location.offset + start as u64)
            .map_err(|source| io(path, source))
    }
}

/// The bytes of the file that a tensor is read from.
fn stored_bytes(location: &Location) -> usize {
    match location.order {
        Order::Blocks(kind, part) => location.shape.count() / kind.values(part) * kind.bytes(),
        Order::Words(_) => location.shape.count() / 2,
        Order::ZeroColumns(own) => {
            let rows = location.shape.dims.first().copied().unwrap_or(0);
            location.shape.dtype.storage_bytes(rows * own)
        }
        Order::Shared(shared) => shared.bytes(&location.shape),
        Order::Tiles(tiles) => tiles.stored_bytes(&location.shape),
        Order::AsShown
        | Order::Transposed
        | Order::HalvesSwapped
        | Order::UnitMatrix
        | Order::HighFirst
        | Order::Constant(_)
        | Order::Times(_) => location.shape.bytes(),
    }
}

/// The tensor of the bytes that are read for it.
fn in_order(location: &Location, mut data: Vec<u8>) -> HostTensor {
    match location.order {
        Order::AsShown | Order::UnitMatrix | Order::Constant(_) => {}
        Order::Transposed => data = transpose(&data, location),
        Order::HalvesSwapped => {
            let half = data.len() / 2;
            data.rotate_left(half);
        }
        Order::Shared(shared) => return of_file_order(location.shape.clone(), data, shared),
        Order::Times(bits) => {
            for value in data.as_chunks_mut().0 {
                *value = (f32::from_le_bytes(*value) * f32::from_bits(bits)).to_le_bytes();
            }
        }
        Order::HighFirst => data.iter_mut().for_each(|byte| *byte = byte.rotate_left(4)),
        Order::Blocks(kind, part) => data = kind.extract(part, &data),
        Order::Words(words) => data = of_words(words, &location.shape, &data),
        Order::ZeroColumns(own) => data = with_zeros(own, &location.shape, &data),
        Order::Tiles(tiles) => data = tiles.unpack(&location.shape, &data),
    }
    HostTensor {
        shape: location.shape.clone(),
        data,
    }
}

/// The rows of a matrix of `own` columns with zeros after them.
fn with_zeros(own: usize, shape: &Shape, data: &[u8]) -> Vec<u8> {
    let bytes = |columns: usize| shape.dtype.storage_bytes(columns).max(1);
    let columns = shape.dims.last().copied().unwrap_or(0);
    let mut wide = vec![0; shape.bytes()];
    let rows = wide.chunks_exact_mut(bytes(columns));
    for (wide, row) in rows.zip(data.chunks_exact(bytes(own))) {
        wide[..row.len()].copy_from_slice(row);
    }
    wide
}

/// The integers of a tensor that lie in words.
fn of_words(words: Words, shape: &Shape, data: &[u8]) -> Vec<u8> {
    const REORDERED: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    let columns = shape.dims.last().copied().unwrap_or(1).max(1);
    let rows = shape.count() / columns;
    let mut integers = vec![0; shape.count()];
    for (at, word) in data.as_chunks::<4>().0.iter().enumerate() {
        let word = u32::from_le_bytes(*word);
        for (nibble, reordered) in REORDERED.into_iter().enumerate() {
            let place = if words.reordered { reordered } else { nibble };
            let i = 8 * at + place;
            let i = match words.transposed {
                true => i % rows * columns + i / rows,
                false => i,
            };
            // A shift to the right keeps the sign.
            integers[i] = (((word >> (4 * nibble)) as u8) << 4) as i8 >> 4;
        }
    }
    let bytes: Vec<u8> = integers
        .into_iter()
        .map(|integer: i8| integer as u8)
        .collect();
    match shape.dtype.bits() {
        4 => packed(&bytes),
        _ => bytes,
    }
}

/// Whether all numbers are finite: in the others all bits of the exponent are set. Looks at every number, because a
/// loop that ends early is not vectorized.
fn is_finite(dtype: DType, bytes: &[u8]) -> bool {
    let halves = |exponent: u16| {
        let numbers = bytes.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b));
        !numbers.fold(false, |found, bits| found | (bits & exponent == exponent))
    };
    match dtype {
        DType::F16 => halves(0x7c00),
        DType::BF16 => halves(0x7f80),
        DType::F32 => {
            const EXPONENT: u32 = 0x7f80_0000;
            let numbers = bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b));
            !numbers.fold(false, |found, bits| found | (bits & EXPONENT == EXPONENT))
        }
        DType::F8E4M3Fn => !bytes
            .iter()
            .fold(false, |found, byte| found | (byte & 0x7f == 0x7f)),
        DType::F8E5M2 => !bytes
            .iter()
            .fold(false, |found, byte| found | (byte & 0x7c == 0x7c)),
        _ => true,
    }
}

/// `bytes` bytes of any value: `buffer`, or where it is too small new memory, which the system gives zeroed.
fn sized(mut buffer: Vec<u8>, bytes: usize) -> Vec<u8> {
    if buffer.capacity() < bytes {
        return vec![0; bytes];
    }
    buffer.resize(bytes, 0);
    buffer
}

/// Memory of tensors that are done with.
#[derive(Default)]
struct Memory {
    /// Oldest first.
    kept: VecDeque<Vec<u8>>,
    /// Their capacity.
    bytes: usize,
    /// The most that is kept.
    limit: usize,
}

impl Memory {
    /// Memory for `bytes` bytes, at most twice as much; empty where none is kept. The same length is best: other memory
    /// is filled up with zeros.
    fn take(&mut self, bytes: usize) -> Vec<u8> {
        let fits = |kept: &Vec<u8>| kept.capacity() >= bytes && kept.capacity() / 2 <= bytes;
        let best = (0..self.kept.len())
            .filter(|&i| fits(&self.kept[i]))
            .min_by_key(|&i| (self.kept[i].len() != bytes, self.kept[i].capacity()));
        let taken = best.and_then(|i| self.kept.remove(i)).unwrap_or_default();
        self.bytes -= taken.capacity();
        taken
    }

    fn give(&mut self, buffer: Vec<u8>) {
        if buffer.capacity() < SMALLEST_KEPT || buffer.capacity() > self.limit {
            return;
        }
        self.bytes += buffer.capacity();
        self.kept.push_back(buffer);
        while self.bytes > self.limit {
            let dropped = self.kept.pop_front().unwrap_or_default();
            self.bytes -= dropped.capacity();
        }
    }
}

/// The bytes of the matrix `location.shape`, of which `data` is the transpose.
fn transpose(data: &[u8], location: &Location) -> Vec<u8> {
    let size = location.shape.dtype.storage_bytes(1);
    let mut out = vec![0; data.len()];
    if let [rows, columns] = location.shape.dims[..]
        && !data.is_empty()
    {
        out.par_chunks_mut(columns * size)
            .enumerate()
            .for_each(|(row, out)| {
                for (column, element) in out.chunks_exact_mut(size).enumerate() {
                    let at = (column * rows + row) * size;
                    element.copy_from_slice(&data[at..at + size]);
                }
            });
    }
    out
}

/// The unit matrix of these rows and columns.
fn unit_matrix(shape: &Shape) -> Result<HostTensor, WeightsError> {
    let columns = shape.dims.last().copied().unwrap_or(1);
    let is_one = |i: usize| i / columns == i % columns;
    let values: Vec<f32> = (0..shape.count())
        .map(|i| f32::from(u8::from(is_one(i))))
        .collect();
    let made = HostTensor::from_f32(shape.dims.clone(), &values);
    made.and_then(|tensor| cast::cast(tensor, shape.dtype))
        .map_err(|source| WeightsError::Cast {
            name: "a unit matrix".to_owned(),
            source,
        })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;
    use std::time::Instant;

    use super::*;
    use crate::weights::{TensorView, save};

    fn write(path: &Path, name: &str, dtype: DType, data: &[u8]) -> Checkpoint {
        let view = TensorView {
            name,
            dtype,
            dims: &[data.len() / dtype.storage_bytes(1)],
            data,
        };
        save(path, [view], &BTreeMap::new()).unwrap();
        Checkpoint::open(path).unwrap()
    }

    #[test]
    fn large_tensors_are_read_in_parts() {
        let dir = tempfile::tempdir().unwrap();
        let data: Vec<u8> = (0..2 * READ_CHUNK + 5).map(|i| (i / 251) as u8).collect();
        let file = write(&dir.path().join("a"), "large", DType::U8, &data);
        assert!(file.read("large").unwrap().data == data);
    }

    #[test]
    fn casting_while_reading_is_casting() {
        let dir = tempfile::tempdir().unwrap();
        for elements in [0, 1, CAST_CHUNK, CAST_CHUNK + 1, 3 * CAST_CHUNK + 4097] {
            let values: Vec<u8> = (0..elements as u32)
                .flat_map(|i| f32::from_bits(i.wrapping_mul(40_503) % 0x7f80_0000).to_le_bytes())
                .collect();
            let file = write(&dir.path().join("f32"), "x", DType::F32, &values);
            for dtype in [DType::F16, DType::BF16, DType::F64] {
                let whole = cast::cast(file.read("x").unwrap(), dtype).unwrap();
                assert!(
                    file.read_as("x", dtype).unwrap() == whole,
                    "{elements} {dtype}"
                );
            }
            let mut halves = cast::cast(file.read("x").unwrap(), DType::F16).unwrap();
            for bytes in halves.data.as_chunks_mut().0 {
                // Those that became infinite are made the largest.
                let bits = u16::from_le_bytes(*bytes).min(0x7bff);
                *bytes = bits.to_le_bytes();
            }
            let file = write(&dir.path().join("f16"), "x", DType::F16, &halves.data);
            for dtype in [DType::F32, DType::BF16] {
                let whole = cast::cast(halves.clone(), dtype).unwrap();
                let read = file.read_as("x", dtype).unwrap();
                // NaNs do not equal themselves.
                assert!(read.shape == whole.shape && read.data == whole.data);
            }
        }
    }

    #[test]
    fn what_is_no_finite_number_is_named() {
        let dir = tempfile::tempdir().unwrap();
        for (dtype, largest, infinity) in [
            (
                DType::F32,
                &[0xff, 0xff, 0x7f, 0xff][..],
                &[0, 0, 0x80, 0x7f][..],
            ),
            (DType::BF16, &[0x7f, 0x7f], &[0x80, 0xff]),
            (DType::F16, &[0xff, 0x7b], &[0x01, 0x7c]),
        ] {
            let path = dir.path().join(dtype.stablehlo());
            let mut data = largest.repeat(CAST_CHUNK + 7);
            write(&path, "x", dtype, &data)
                .read_as("x", DType::F32)
                .unwrap();
            let last = data.len() - infinity.len();
            data[last..].copy_from_slice(infinity);
            let file = write(&path, "x", dtype, &data);
            for as_dtype in [DType::F32, DType::F16, DType::BF16] {
                let error = file.read_as("x", as_dtype).unwrap_err().to_string();
                let expected = format!("{}: tensor x: it holds NaN or infinity", path.display());
                assert!(error.starts_with(&expected), "{error}");
            }
            // As it is, it can be looked at.
            file.read("x").unwrap();
        }
    }

    /// `count` tensors of f32, the i-th of i elements i.
    fn many(dir: &Path, count: usize) -> Checkpoint {
        let path = dir.join("many.safetensors");
        let tensors: Vec<(String, [usize; 1], Vec<u8>)> = (0..count)
            .map(|i| (format!("t{i}"), [i], (i as f32).to_le_bytes().repeat(i)))
            .collect();
        let views = tensors.iter().map(|(name, dims, data)| TensorView {
            name,
            dtype: DType::F32,
            dims,
            data,
        });
        save(&path, views, &BTreeMap::new()).unwrap();
        Checkpoint::open(&path).unwrap()
    }

    #[test]
    fn many_tensors_come_in_the_order_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let file = many(dir.path(), 300);
        let wanted: Vec<(String, DType)> = (0..300)
            .map(|i| {
                (
                    format!("t{}", i * 7 % 300),
                    [DType::F32, DType::BF16][i % 2],
                )
            })
            .collect();
        let collect = || {
            let mut found = Vec::new();
            file.read_all_with(&wanted, |name, tensor| {
                assert_eq!(*tensor, file.read_as(name, tensor.shape.dtype)?);
                found.push((name.to_owned(), tensor.shape.dtype));
                Ok::<(), WeightsError>(())
            })
            .unwrap();
            found
        };
        assert_eq!(collect(), wanted);
        // From inside a pool of one thread, which must not wait for itself.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build();
        assert_eq!(pool.unwrap().install(collect), wanted);
    }

    #[test]
    fn memory_is_used_again_and_bounded() {
        let mut memory = Memory {
            limit: 4 << 20,
            ..Memory::default()
        };
        assert_eq!(memory.take(1 << 20).capacity(), 0);
        for mib in [1, 3] {
            memory.give(vec![1; mib << 20]);
        }
        memory.give(vec![1; 5]);
        assert_eq!((memory.kept.len(), memory.bytes), (2, 4 << 20));
        assert!(
            memory.take(1 << 10).is_empty(),
            "too large a buffer is not taken"
        );
        assert!(memory.take((3 << 20) + 1).is_empty());
        let two = sized(memory.take(2 << 20), 2 << 20);
        assert_eq!((two.len(), two.capacity(), two[0]), (2 << 20, 3 << 20, 1));
        memory.give(two);
        // The oldest goes first.
        memory.give(vec![2; 1 << 20]);
        assert_eq!((memory.kept.len(), memory.bytes), (2, 4 << 20));
        assert_eq!(memory.take(1 << 20)[0], 2);
        memory.give(vec![3; 5 << 20]);
        assert_eq!((memory.kept.len(), memory.bytes), (1, 3 << 20));
        assert_eq!(sized(Vec::new(), 3), [0; 3]);
    }

    #[test]
    fn an_error_of_either_side_ends_the_reading() {
        let dir = tempfile::tempdir().unwrap();
        let file = many(dir.path(), 40);
        let wanted: Vec<(String, DType)> = (0..40).map(|i| (format!("t{i}"), DType::F32)).collect();
        let mut seen = 0;
        let error = file
            .read_all_with(&wanted, |name, _| {
                seen += 1;
                match seen {
                    5 => file.read(&format!("{name}x")).map(|_| ()),
                    _ => Ok(()),
                }
            })
            .unwrap_err();
        assert_eq!(seen, 5);
        assert!(error.to_string().contains("no tensor t4x"), "{error}");

        let mut unknown = wanted.clone();
        unknown.push(("nowhere".into(), DType::F32));
        let mut seen = 0;
        let error = file
            .read_all_with(&unknown, |_, _| {
                seen += 1;
                Ok::<(), WeightsError>(())
            })
            .unwrap_err();
        assert_eq!(seen, 0, "an unknown name is told before any work");
        assert!(error.to_string().contains("no tensor nowhere"), "{error}");

        // Cut after it was opened: what is left is read, what is gone is an error.
        let path = file.files().next().unwrap().to_owned();
        let whole = std::fs::metadata(&path).unwrap().len();
        std::fs::File::options()
            .write(true)
            .open(&path)
            .and_then(|f| f.set_len(whole - 1))
            .unwrap();
        let mut seen = 0;
        let error = file
            .read_all_with(&wanted, |_, _| {
                seen += 1;
                Ok::<(), WeightsError>(())
            })
            .unwrap_err();
        assert!(matches!(error, WeightsError::Io { .. }), "{error}");
        assert!(seen > 0 && seen < 40, "{seen}");
    }

    /// `cargo test --release --lib reading_speed -- --ignored --nocapture`: bytes of the file a second, from the
    /// page cache, beside one thread that reads the same bytes into one buffer as `dd` does.
    #[test]
    #[ignore = "measures the machine, 1 GiB of disk"]
    fn reading_speed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        // As SDXL's UNet: most bytes in matrices of 3 to 26 MB, most tensors small.
        let sizes = [13_107_200, 6_553_600, 1_638_400, 1_280, 1_280, 2_560];
        let data = vec![0x3c; 2 * sizes[0]];
        let tensors: Vec<(String, [usize; 1])> = (0..150)
            .map(|i| (format!("t{i:03}"), [sizes[i % sizes.len()]]))
            .collect();
        let views = tensors.iter().map(|(name, dims)| TensorView {
            name,
            dtype: DType::F16,
            dims,
            data: &data[..2 * dims[0]],
        });
        save(&path, views, &BTreeMap::new()).unwrap();
        let file = Checkpoint::open(&path).unwrap();
        let gigabytes = std::fs::metadata(&path).unwrap().len() as f64 / 1e9;
        // Ticks of 10 ms that all threads of this process worked.
        let ticks = || -> u64 {
            let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
            let fields = stat.rsplit_once(')').unwrap().1.split_whitespace();
            let times = fields.skip(11).take(2);
            times.map(|n| n.parse::<u64>().unwrap()).sum()
        };
        let work_of = |what: &str, work: &mut dyn FnMut()| -> f64 {
            work();
            let before = ticks();
            let seconds = (0..8).map(|_| {
                let start = Instant::now();
                work();
                start.elapsed().as_secs_f64()
            });
            let rate = gigabytes / seconds.fold(f64::INFINITY, f64::min);
            let each = (ticks() - before) as f64 * 10.0 / 8.0 / gigabytes;
            println!("{what}: {rate:.2} GB/s at best, {each:.0} ms of work a GB");
            each
        };
        let mut buffer = vec![0; READ_CHUNK];
        let raw = std::fs::File::open(&path).unwrap();
        let copy = work_of("one thread, one buffer", &mut || {
            let mut at = 0;
            loop {
                match raw.read_at(&mut buffer, at).unwrap() {
                    0 => break,
                    n => at += n as u64,
                }
            }
        });
        let mut read = Vec::new();
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            let wanted: Vec<(&str, DType)> = file.names().map(|n| (n, dtype)).collect();
            read.push(work_of(&format!("read_all_with as {dtype}"), &mut || {
                file.read_all_with(&wanted, |_, tensor| {
                    std::hint::black_box(&tensor.data);
                    Ok::<(), WeightsError>(())
                })
                .unwrap();
            }));
        }
        // Work rather than time, which other programs take their share of.
        let share = rayon::current_num_threads() as f64 * copy / read[0];
        println!("on idle cores at most {share:.2} of one thread's rate");
        assert!(share > 0.8);
    }
}
