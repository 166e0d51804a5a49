//! 3x3 and 1x1 convolutions as products: each of the kernel's places is a product of rows that lie one after the other, and
//! the sums of the places on the left and on the right move by a pixel. In int8 the image is rounded to integers on the
//! chip.

mod doubled;
mod narrow;

pub use doubled::DoubledConvolution;
pub use narrow::NarrowConvolution;

use crate::dtype::DType;
use crate::graph::{Batch, InferError};
use crate::shape::Shape;

use super::Features;
use super::arithmetic::{Arithmetic, MOST_TERMS, Rounding, Widening, block_of_columns};
use super::call::{KernelCall, refused};
use super::mosaic::{Kernel, LANES, Place, Scratch, Value as KernelValue, Window, most_bytes};

/// Rows of an int8 tile, and of an `f32` one.
const TILE_ROWS: [usize; 2] = [32, 8];
/// The windows of the rows before a block and behind it.
const BEFORE: usize = 1;
const BEHIND: usize = 2;
/// The windows of the image of a 3x3 convolution.
const IMAGES: usize = 3;
/// Pixels and result's channels of a block, at most.
const MOST_PIXELS: usize = 1024;
const MOST_COLUMNS: usize = 1280;
/// Instructions of wide matrix units in a block of a training step, at most. libtpu's simulator compares each access to the core's
/// memory with all before it in code without loops: a step has some twenty such kernels, and those of twice as many instructions take
/// four times as long, for 1 to 3 % fewer cycles.
const MOST_INSTRUCTIONS: usize = 8_192;
/// Pixels of a block whose weights are widened inside, if so many fit: with 64 of them 1,280 channels of 32x32 pixels took 1.5
/// times the cycles on v5e.
const LEAST_PIXELS: usize = 512;

/// The convolution of an image with a kernel of `side` rows and columns, 1 or 3, a stride of 1 and zeros around the image
/// for each to keep its size, plus the bias; in bf16. In int8 the image is quantized as AQT does it, one scale an image,
/// and the sums are multiplied with its scale and those of the result's channels; by recorded scales as AMD Quark does, with 1 as the
/// scale of images.
///
/// Operands: the image `side` times, `bf16[batch, height * width, inputs]`; the kernel, as [`Convolution::weights`] says, and the
/// scales of groups of stored weights, `f32[1, groups, outputs]`; in int8 the inverse scale `f32[batch, 1, inputs]`, the same
/// for each; `f32[batch, 3, outputs]`: the image's scale, the outputs' scales and biases, or in bf16 `f32[batch, 1, outputs]`,
/// the biases; and what `added` says. The result is `bf16[batch, height * width, outputs]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Convolution {
    pub arithmetic: Arithmetic,
    pub height: usize,
    pub width: usize,
    pub side: usize,
    pub weights: Weights,
    pub added: Added,
    /// Of the chip.
    pub features: Features,
}

/// How a convolution has its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// `[1, side * outputs, side * padded inputs]`: for each block of [`Convolution::columns`] outputs the kernel's rows one
    /// after the other, and for each place in a row the inputs, with zeros up to [`Convolution::padded_inputs`].
    Rows,
    /// Stored integers, `[1, side * side * inputs, outputs]`: the inputs of each of the kernel's places, which are widened inside.
    /// Groups are of the inputs of a place, and the same for all places.
    Terms {
        /// Whether one core takes all steps, so that it widens once for a block of outputs.
        one_core: bool,
    },
    /// In bf16, once for each of the kernel's places, row by row: `[1, side * side * outputs, inputs]`, the places one after
    /// the other. So a checkpoint's weights lie on a TPU, and those of a training step are new in each.
    Places,
    /// The same of the convolution whose image's derivative this is, `[1, side * side * inputs, outputs]`: the places are read in
    /// reverse.
    Reversed,
}

/// What is added to a convolution that is rounded to bf16. The sum is rounded too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Added {
    Nothing,
    /// A last operand of the result's shape.
    Image,
    /// The same for all pixels of an image: a row behind the biases.
    Row,
}

/// What a step computes: some rows of an image, some outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    image_rows: usize,
    columns: usize,
}

/// The scratch memories of a step.
struct Memories {
    /// Rows of the image as they are multiplied.
    image: Scratch,
    /// The sums of the kernel's outer columns, which move.
    moved: Vec<Scratch>,
    /// Widened weights of each of the kernel's places, row by row. Memories of their own, so that one is written while another
    /// is multiplied.
    wide: Vec<Scratch>,
}

/// The numbers of images and channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sizes {
    batch: usize,
    inputs: usize,
    outputs: usize,
}

impl Convolution {
    /// A 3x3 convolution in bf16, whose windows and rows of the image others read too.
    fn in_bf16(height: usize, width: usize, features: Features) -> Convolution {
        Convolution {
            arithmetic: Arithmetic::Bf16,
            height,
            width,
            side: 3,
            weights: Weights::Rows,
            added: Added::Nothing,
            features,
        }
    }

    /// Whether a core can hold what the kernel works with.
    pub fn fits(&self, inputs: usize, outputs: usize) -> bool {
        self.columns(inputs, outputs).is_some()
    }

    /// Outputs of a block. `None` where no block fits.
    pub fn columns(&self, inputs: usize, outputs: usize) -> Option<usize> {
        let sizes = Sizes {
            batch: 1,
            inputs,
            outputs,
        };
        self.block(sizes).map(|block| block.columns)
    }

    /// Inputs with zeros up to whole registers, so that those of each place begin one.
    pub fn padded_inputs(inputs: usize) -> usize {
        inputs.next_multiple_of(LANES)
    }

    /// Of the blocks that fit the core's memory, and for which the matrix units multiply the fewest columns, the one for which the
    /// least is read; of stored weights of those with enough pixels.
    fn block(&self, sizes: Sizes) -> Option<Block> {
        let is_known = self.width.is_multiple_of(TILE_ROWS[0])
            && self.width > 0
            && (self.widening(sizes.inputs).is_some() || !self.widens())
            && [1, 3].contains(&self.side)
            && self.side * self.side * sizes.inputs <= MOST_TERMS;
        // What the compiler puts there itself is not counted.
        let most = most_bytes(self.features.kernel_memory);
        let blocks = blocks(self.height, self.width, sizes.outputs);
        let fitting = blocks.filter(|block| {
            is_known && self.is_short(*block, sizes) && self.bytes(*block, sizes) <= most
        });
        fitting.min_by_key(|block| {
            let missing = match self.widens() {
                true => LEAST_PIXELS.saturating_sub(block.image_rows * self.width),
                false => 0,
            };
            let multiplied = self
                .features
                .multiplied_columns(sizes.outputs, block.columns);
            (missing, multiplied, self.bytes_read(*block, sizes))
        })
    }

    /// Whether what a block is computed with is soon compiled and simulated.
    fn is_short(&self, block: Block, sizes: Sizes) -> bool {
        let is_of_training = matches!(self.weights, Weights::Places | Weights::Reversed);
        let pixels = block.image_rows * self.width;
        let of_place = self
            .features
            .instructions(pixels, sizes.inputs, block.columns);
        let instructions = self.side * self.side * of_place;
        !is_of_training || !self.features.wide_units || instructions <= MOST_INSTRUCTIONS
    }

    /// Whether weights are widened inside.
    fn widens(&self) -> bool {
        matches!(self.weights, Weights::Terms { .. })
    }

    /// How weights of so many inputs are widened inside. `None` where they are not.
    fn widening(&self, inputs: usize) -> Option<Widening> {
        match (self.arithmetic, self.weights) {
            (Arithmetic::Stored(weights), Weights::Terms { .. }) => {
                Widening::new(weights, inputs, [self.side, self.side + 1])
            }
            _ => None,
        }
    }

    /// Inputs of a group, if groups of weights that are widened inside have scales.
    fn group(&self) -> Option<usize> {
        match self.arithmetic {
            Arithmetic::Stored(weights) if self.widens() => weights.group,
            _ => None,
        }
    }

    /// The dimensions of the grid that images, their rows and outputs lie along. What is computed once for a block stays while
    /// the last ones count: of an image, or of stored weights.
    fn order(&self) -> [usize; 3] {
        match self.widens() {
            true => [1, 2, 0],
            false => [0, 1, 2],
        }
    }

    /// The type of the image when it is multiplied, and of weights. Stored ones are widened to it, inside or before the kernel.
    fn operand(&self) -> DType {
        match self.arithmetic {
            Arithmetic::Stored(_) => DType::BF16,
            arithmetic => arithmetic.operand(),
        }
    }

    /// Whether the image is rounded to integers.
    fn rounds(&self) -> bool {
        match self.arithmetic {
            Arithmetic::Int8 | Arithmetic::RecordedInt8 => true,
            Arithmetic::Bf16 | Arithmetic::Stored(_) => false,
        }
    }

    /// Bytes of operands that one image takes.
    fn bytes_read(&self, block: Block, sizes: Sizes) -> usize {
        let row = 2 * self.width * sizes.inputs;
        let blocks = self.height / block.image_rows;
        let inputs = Convolution::padded_inputs(sizes.inputs);
        let numbers = self.side * self.side * inputs * sizes.outputs;
        let kernel = self.operand().bits() / 8 * numbers;
        let image = blocks * self.rows_seen(block) * row;
        match self.widens() {
            // The kernel is read once.
            true => image * (sizes.outputs / block.columns),
            false => image + blocks * kernel,
        }
    }

    /// Bytes of operands that Mosaic copies before it multiplies them: in bf16 those of two products, and more where inputs fill
    /// no register and the rest is masked. Found by what it refused; in int8 it refused nothing.
    fn copied(&self, block: Block, inputs: usize) -> usize {
        let copies = match (self.arithmetic, inputs.is_multiple_of(LANES)) {
            (Arithmetic::Int8 | Arithmetic::RecordedInt8, _) => return 0,
            (Arithmetic::Bf16 | Arithmetic::Stored(_), true) => 2,
            (Arithmetic::Bf16 | Arithmetic::Stored(_), false) => 4,
        };
        let rows = block.image_rows * self.width + block.columns;
        copies * rows * Convolution::padded_inputs(inputs) * self.operand().bits() / 8
    }

    /// Rows of the image that a block is computed from.
    fn rows_seen(&self, block: Block) -> usize {
        block.image_rows + self.side - 1
    }

    /// Bytes of the core's memory: windows, the rows of the image as they are multiplied, the sums of the kernel's
    /// columns, of which two are moved, and what is widened.
    fn bytes(&self, block: Block, sizes: Sizes) -> usize {
        let windows = Kernel::new(Vec::new(), self.windows(block, sizes));
        let pixels = block.image_rows * self.width;
        let inputs = sizes.inputs.next_multiple_of(LANES);
        let image = self.rows_seen(block) * self.width * inputs;
        let image = self.operand().bits() / 8 * image;
        // Those that are moved have a tile of rows before and behind them.
        let rows = (self.side + 2) * pixels + 4 * TILE_ROWS[1];
        let sums = rows * block.columns.next_multiple_of(LANES) * 4;
        let wide = match self.widens() {
            true => 2 * self.side * self.side * inputs * block.columns.next_multiple_of(LANES),
            false => 0,
        };
        windows.window_bytes() + image + sums + wide + self.copied(block, sizes.inputs)
    }

    /// The row of biases in what each output is scaled with. Before it are scales, behind it what is added.
    fn row_of_biases(&self) -> usize {
        match self.arithmetic {
            Arithmetic::Int8 | Arithmetic::RecordedInt8 => 2,
            Arithmetic::Bf16 | Arithmetic::Stored(_) => {
                usize::from(self.arithmetic.scales_columns())
            }
        }
    }

    /// Rows of what each output is scaled with.
    fn rows_of_columns(&self) -> usize {
        self.row_of_biases()
            + match self.added {
                Added::Nothing | Added::Image => 1,
                Added::Row => 2,
            }
    }

    /// Windows of the kernel and of scales of its groups, behind those of the image.
    fn windows_of_weights(&self) -> usize {
        match self.weights {
            Weights::Rows => 1,
            Weights::Terms { .. } => 1 + usize::from(self.group().is_some()),
            Weights::Places | Weights::Reversed => self.side * self.side,
        }
    }

    /// The window of what each output is scaled with; before it is the inverse scale in int8.
    fn window_of_columns(&self) -> usize {
        self.side + self.windows_of_weights() + usize::from(self.rounds())
    }

    /// The image, its rows before and behind the block if the kernel's side is 3, then the kernel, in int8
    /// the inverse scale, what each output is scaled with, an image to add and the result.
    fn windows(&self, block: Block, sizes: Sizes) -> Vec<Window> {
        let Sizes {
            batch,
            inputs,
            outputs,
        } = sizes;
        let Block {
            image_rows,
            columns,
        } = block;
        let terms = self.side * Convolution::padded_inputs(inputs);
        let places = self.side * self.side;
        let [along_images, along_rows, along_columns] = self.order().map(Some);
        let along_columns = along_columns.filter(|_| outputs > columns);
        let x = Window {
            dtype: DType::BF16,
            array: [batch, self.height * self.width, inputs],
            block: [image_rows * self.width, inputs],
            index: [along_images, along_rows, None],
            place: Place::Own,
            first_column: 0,
        };
        let row = |place| Window {
            block: [self.width, inputs],
            place,
            ..x
        };
        let before = row(Place::Before(image_rows));
        let behind = row(Place::Behind(image_rows));
        let rows = Window {
            dtype: self.operand(),
            array: [1, self.side * outputs, terms],
            block: [self.side * columns, terms],
            index: [None, along_columns, None],
            place: Place::Own,
            first_column: 0,
        };
        let of_terms = |dtype: DType, terms: usize| Window {
            dtype,
            array: [1, terms, outputs],
            block: [terms, columns],
            index: [None, None, along_columns],
            place: Place::Own,
            first_column: 0,
        };
        let place = |place: usize| match self.weights {
            Weights::Rows => rows,
            Weights::Terms { .. } => match (place, self.group()) {
                (1, Some(group)) => of_terms(DType::F32, inputs / group),
                _ => of_terms(self.arithmetic.operand(), places * inputs),
            },
            Weights::Places => Window {
                array: [1, places * outputs, inputs],
                block: [columns, inputs],
                place: Place::From(place * outputs / columns),
                ..rows
            },
            Weights::Reversed => Window {
                block: [inputs, columns],
                place: Place::From(places - 1 - place),
                ..of_terms(self.operand(), places * inputs)
            },
        };
        let inverse = Window {
            dtype: DType::F32,
            array: [batch, 1, inputs],
            block: [1, inputs],
            index: [along_images, None, None],
            place: Place::Own,
            first_column: 0,
        };
        let rows = self.rows_of_columns();
        let of_columns = Window {
            dtype: DType::F32,
            array: [batch, rows, outputs],
            block: [rows, columns],
            index: [along_images, None, along_columns],
            place: Place::Own,
            first_column: 0,
        };
        let result = Window {
            dtype: DType::BF16,
            array: [batch, self.height * self.width, outputs],
            block: [image_rows * self.width, columns],
            index: [along_images, along_rows, along_columns],
            place: Place::Own,
            first_column: 0,
        };
        let mut windows = match self.side {
            1 => vec![x],
            _ => vec![x, before, behind],
        };
        windows.extend((0..self.windows_of_weights()).map(place));
        if self.rounds() {
            windows.push(inverse);
        }
        windows.push(of_columns);
        if self.added == Added::Image {
            windows.push(result);
        }
        windows.push(result);
        windows
    }

    fn kernel(&self, block: Block, sizes: Sizes) -> Kernel {
        let steps = [
            sizes.batch,
            self.height / block.image_rows,
            sizes.outputs / block.columns,
        ];
        let mut grid = vec![0; steps.len()];
        for (dim, count) in self.order().into_iter().zip(steps) {
            grid[dim] = count;
        }
        let mut kernel = Kernel::new(grid, self.windows(block, sizes));
        kernel.memory = self.features.kernel_memory;
        if self.widens() {
            kernel.join_last_dims();
        }
        self.step(&mut kernel, block, sizes);
        kernel
    }

    fn step(&self, k: &mut Kernel, block: Block, sizes: Sizes) {
        let memories = self.memories(k, block, sizes);
        let [along_images, along_rows, along_columns] = self.order();
        let stays = sizes.outputs > block.columns && !self.widens();
        match stays {
            false => self.keep_image(k, block.image_rows, memories.image),
            true => k.when_first(along_columns, |k| {
                self.keep_image(k, block.image_rows, memories.image);
            }),
        }
        let widening = self.widening(sizes.inputs);
        let all = [along_images, along_rows];
        let steps = sizes.batch * self.height / block.image_rows;
        match self.weights {
            Weights::Terms { one_core: true } if steps > 1 => {
                k.when_first_of(&all, |k| self.multiply(k, &memories, block, widening));
                k.unless_first_of(&all, |k| self.multiply(k, &memories, block, None));
            }
            _ => self.multiply(k, &memories, block, widening),
        }
    }

    fn memories(&self, k: &mut Kernel, block: Block, sizes: Sizes) -> Memories {
        let pixels = block.image_rows * self.width;
        let (inputs, columns) = (sizes.inputs, block.columns);
        let rows_seen = self.rows_seen(block) * self.width;
        let wide = match self.widens() {
            true => self.side * self.side,
            false => 0,
        };
        // A tile of rows before and behind the sums.
        let moved = [pixels + 2 * TILE_ROWS[1], columns];
        Memories {
            image: k.scratch(self.operand(), [rows_seen, inputs]),
            moved: (1..self.side)
                .map(|_| k.scratch(self.arithmetic.sum(), moved))
                .collect(),
            wide: (0..wide)
                .map(|_| k.scratch(self.operand(), [inputs, columns]))
                .collect(),
        }
    }

    /// Multiplies and stores the block of a step. With `widening` each part of the weights is widened while one before it is
    /// multiplied.
    fn multiply(
        &self,
        k: &mut Kernel,
        memories: &Memories,
        block: Block,
        widening: Option<Widening>,
    ) {
        let pixels = block.image_rows * self.width;
        let columns = block.columns;
        let mut sums = self.column(k, memories, self.side / 2, block, widening);
        if let &[left, right] = &memories.moved[..] {
            // What the pixels on the left and on the right of each pixel add to it stands in the place of those pixels.
            let sides = [0, 2].map(|place| self.column(k, memories, place, block, widening));
            let last = self.width as f64 - 1.0;
            let left = self.moved(k, left, sides[0], -1, 0.0);
            let right = self.moved(k, right, sides[1], 1, last);
            sums = k.add(sums, left);
            sums = k.add(sums, right);
        }
        let mut y = k.convert(sums, DType::F32);
        let of_columns = |k: &mut Kernel, row: usize| {
            let row = k.row(row);
            let row = k.load_part(self.window_of_columns(), row, 1, 0..columns);
            k.broadcast_row(row, pixels)
        };
        for scale in 0..self.row_of_biases() {
            let scale = of_columns(k, scale);
            y = k.mul(y, scale);
        }
        let bias = of_columns(k, self.row_of_biases());
        let y = k.add(y, bias);
        let mut y = k.convert(y, DType::BF16);
        let added = match self.added {
            Added::Nothing => None,
            Added::Image => {
                let first = k.row(0);
                let image = k.load(self.window_of_columns() + 1, first, pixels);
                Some(k.convert(image, DType::F32))
            }
            Added::Row => Some(of_columns(k, self.row_of_biases() + 1)),
        };
        if let Some(added) = added {
            let wide = k.convert(y, DType::F32);
            let sum = k.add(wide, added);
            y = k.convert(sum, DType::BF16);
        }
        k.store(y, [0, 0]);
    }

    /// The products with one column of the convolution's kernel, the number `place`: sums over its rows, `[pixels,
    /// columns]`.
    fn column(
        &self,
        k: &mut Kernel,
        memories: &Memories,
        place: usize,
        block: Block,
        widening: Option<Widening>,
    ) -> KernelValue {
        let pixels = block.image_rows * self.width;
        let image = memories.image;
        let [_, inputs] = k.scratch_size(image);
        let zero = k.splat(self.arithmetic.sum(), [pixels, block.columns], 0.0);
        (0..self.side).fold(zero, |sums, kernel_row| {
            let x = k.kept_part(image, [kernel_row * self.width, 0], [pixels, inputs]);
            let place_of_kernel = kernel_row * self.side + place;
            let of_place = self.side + place_of_kernel;
            match self.weights {
                Weights::Terms { .. } => {
                    let wide = memories.wide[place_of_kernel];
                    if let Some(widening) = widening {
                        widening.widen(k, wide, place_of_kernel * inputs);
                    }
                    let weights = k.kept(wide);
                    k.matmul(x, weights, sums)
                }
                Weights::Rows => {
                    let first = place * Convolution::padded_inputs(inputs);
                    let row = k.row(kernel_row * block.columns);
                    let weights = k.load_part(self.side, row, block.columns, first..first + inputs);
                    k.matmul_transposed(x, weights, sums)
                }
                Weights::Places => {
                    let row = k.row(0);
                    let weights = k.load(of_place, row, block.columns);
                    k.matmul_transposed(x, weights, sums)
                }
                Weights::Reversed => {
                    let row = k.row(0);
                    let weights = k.load(of_place, row, inputs);
                    k.matmul(x, weights, sums)
                }
            }
        })
    }

    /// The value of the pixel `step` further on, and 0 for those in the column `outermost` of the image, which have
    /// none.
    fn moved(
        &self,
        k: &mut Kernel,
        memory: Scratch,
        x: KernelValue,
        step: isize,
        outermost: f64,
    ) -> KernelValue {
        let size = k.size(x);
        k.keep(memory, x, [TILE_ROWS[1], 0]);
        let moved = k.kept_part(memory, [TILE_ROWS[1].saturating_add_signed(step), 0], size);
        let place = k.rows(self.width, size);
        let zero = k.splat(self.arithmetic.sum(), size, 0.0);
        let limit = k.splat(DType::S32, size, outermost);
        let [low, high] = match step < 0 {
            true => [limit, place],
            false => [place, limit],
        };
        let inside = k.less(low, high);
        k.select(inside, moved, zero)
    }

    /// Keeps the rows of the block, the one before it and the one behind it as they are multiplied.
    fn keep_image(&self, k: &mut Kernel, image_rows: usize, image: Scratch) {
        k.repeat(image_rows, Vec::new(), |k, counter, _| {
            let row = k.row_of(counter, self.width, 0);
            let to = k.row_of(counter, self.width, self.side / 2 * self.width);
            self.keep_row(k, 0, [row, to], image);
            Vec::new()
        });
        if self.side == 1 {
            return;
        }
        let last = self.height / image_rows - 1;
        let [_, along_rows, _] = self.order();
        for (window, row, edge) in [(BEFORE, 0, 0), (BEHIND, image_rows + 1, last)] {
            let row = row * self.width;
            let places = [0, row].map(|row| k.row(row));
            self.keep_row(k, window, places, image);
            // Outside the image are zeros.
            k.when(along_rows, edge, |k| {
                let [_, inputs] = k.scratch_size(image);
                let zeros = k.splat(self.operand(), [self.width, inputs], 0.0);
                k.keep(image, zeros, [row, 0]);
            });
        }
    }

    /// Keeps one row of the image, in int8 rounded.
    fn keep_row(
        &self,
        k: &mut Kernel,
        window: usize,
        [from, to]: [KernelValue; 2],
        image: Scratch,
    ) {
        let mut x = k.load(window, from, self.width);
        if self.rounds() {
            let first = k.row(0);
            let inverse = k.load(self.window_of_columns() - 1, first, 1);
            let inverse = k.broadcast_row(inverse, self.width);
            let rounding = Rounding {
                arithmetic: self.arithmetic,
                bf16_vectors: self.features.bf16_vectors,
            };
            x = rounding.integers(k, x, inverse, None);
        }
        k.keep_at(image, x, to, 0);
    }

    /// The sizes that operands tell.
    fn sizes(&self, operands: &[&Shape]) -> Option<Sizes> {
        let images = operands.get(..self.side)?;
        let (x, of_columns) = (images.first()?, operands.get(self.window_of_columns())?);
        let sizes = Sizes {
            batch: *x.dims.first()?,
            inputs: *x.dims.get(2)?,
            outputs: *of_columns.dims.get(2)?,
        };
        let block = Block {
            image_rows: 1,
            columns: sizes.outputs,
        };
        let windows = self.windows(block, sizes);
        let same = images.iter().all(|image| image == x);
        (same && are_of(&windows, operands)).then_some(sizes)
    }
}

/// Whether `windows`, but for the last, the result's, are of arrays like `operands`.
fn are_of(windows: &[Window], operands: &[&Shape]) -> bool {
    let arrays = windows.iter().take(windows.len().saturating_sub(1));
    let arrays = arrays.map(|window| Shape::new(window.dtype, window.array));
    arrays.eq(operands.iter().map(|shape| (*shape).clone()))
}

/// Blocks of whole rows of an image and of a convolution's outputs.
fn blocks(height: usize, width: usize, outputs: usize) -> impl Iterator<Item = Block> {
    let largest = height.min(MOST_PIXELS / width.max(1));
    let rows = (1..=largest).filter(move |rows| height.is_multiple_of(*rows));
    let mut columns: Vec<usize> = (LANES..=MOST_COLUMNS)
        .step_by(LANES)
        .filter_map(|most| block_of_columns(outputs, most))
        .collect();
    columns.dedup();
    rows.flat_map(move |image_rows| {
        let columns = columns.clone().into_iter();
        columns.map(move |columns| Block {
            image_rows,
            columns,
        })
    })
}

impl KernelCall for Convolution {
    fn name(&self) -> &'static str {
        match self.arithmetic {
            Arithmetic::Int8 | Arithmetic::RecordedInt8 => "int8_convolution",
            Arithmetic::Stored(_) if self.widens() => "stored_convolution",
            Arithmetic::Bf16 | Arithmetic::Stored(_) => "convolution",
        }
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        let mut batch = Batch::first(operands.len());
        // Every image has the same kernel.
        batch.operands[self.side..self.side + self.windows_of_weights()].fill(None);
        Some(batch)
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        let sizes = self.sizes(operands)?;
        Some(self.kernel(self.block(sizes)?, sizes))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let sizes = self.sizes(operands);
        let sizes = sizes.filter(|sizes| self.fits(sizes.inputs, sizes.outputs));
        let sizes = sizes.ok_or_else(|| refused("convolution kernel", self, operands))?;
        let dims = [sizes.batch, self.height * self.width, sizes.outputs];
        Ok(Shape::new(DType::BF16, dims))
    }

    fn flops(&self, operands: &[&Shape], result: &Shape) -> u64 {
        let terms = self.side * self.side * operands[0].dims[2];
        (2 * result.count() as u64).saturating_mul(terms as u64)
    }
}
