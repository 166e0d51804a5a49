//! Kernels as MLIR text in the dialects that Mosaic takes.

use std::fmt::Write;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use half::bf16;
use serde::Serialize;
use serde_json::json;

use crate::dtype::DType;

use super::{
    Binary, Counter, Kernel, LANES, Op, Place, Reduction, Statement, Type, Unary, Value, Window,
};

/// Bytes of the core's memory that a kernel takes; what the compiler gives it by default.
pub const VMEM_BYTES: usize = 16 << 20;
/// What a kernel takes that works with more: the v5e, the v5p and the v6e have 128 MiB. What the compiler puts there itself is a
/// few percent of what the kernel counts.
pub const MOST_VMEM_BYTES: usize = 48 << 20;

/// How numbers are rounded to integers.
const TO_NEAREST: &str = "{rounding_mode = #tpu.rounding_mode<to_nearest_even>}";

/// What one call of a kernel costs.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CostEstimate {
    /// Of products: multiply-adds times two.
    pub flops: u64,
    pub transcendentals: u64,
    /// Read and written, of operands and result.
    pub bytes_accessed: u64,
}

/// How many bytes of the memory that a kernel takes its blocks may fill: the compiler keeps some.
pub fn most_bytes(memory: usize) -> usize {
    memory / 16 * 15
}

/// The configuration of the custom call `tpu_custom_call` for a Mosaic module that takes `memory` bytes on the chip. The compiler
/// knows nothing of the cost but what it is told.
pub fn backend_config(module: &str, memory: u64, cost: Option<CostEstimate>) -> String {
    let mut call = json!({ "body": STANDARD.encode(module), "needs_layout_passes": true });
    if let Some(cost) = cost {
        call["cost_estimate"] = json!(cost);
    }
    json!({
        "custom_call_config": call,
        "scoped_memory_configs": [{ "memory_space": 1, "offset": 0, "size": memory }],
    })
    .to_string()
}

/// The argument that holds the number of the entry of stacks.
const NUMBER: &str = "%number: memref<1xi32, #tpu.memory_space<smem>>";

impl Kernel {
    /// The configuration of the kernel's call.
    pub fn backend_config(&self, cost: CostEstimate) -> String {
        backend_config(&self.text(), self.memory as u64, Some(cost))
    }

    /// The kernel as a Mosaic module.
    pub fn text(&self) -> String {
        let mut text = "module {\n".to_string();
        let arguments = (0..self.windows.len()).map(|i| format!("%w{i}: {}", self.memref(i)));
        let mut arguments: Vec<String> = arguments.collect();
        let Steps {
            arguments: grid,
            bounds: steps,
            order,
            places,
        } = self.steps();
        let scratch = self.scratch.iter().enumerate();
        let scratch = scratch.map(|(i, of)| format!("%s{i}: {}", memory(*of)));
        let number = (!self.entries.is_empty()).then(|| NUMBER.to_owned());
        let steps_and_number: Vec<String> = grid.into_iter().chain(number).collect();
        let windows = self.windows.iter().enumerate().map(|(i, window)| {
            let [rows, columns] = window.block;
            let entry = self.entry("1, ", i);
            let buffers = match self.single.contains(&i) {
                true => ", pipeline_mode = #tpu.pipeline_mode<synchronous>",
                false => "",
            };
            format!(
                "{{transform_indices = @at{i}, window_bounds = array<i64: {entry}1, {rows}, {columns}>{buffers}}}"
            )
        });
        let mut windows: Vec<String> = windows.collect();
        if let (Some(count), Some(result)) = (self.result_entries, self.windows.last()) {
            let at = arguments.len() - 1;
            let [batch, rows, columns] = result.array;
            let element = element(result.dtype);
            arguments.insert(
                at,
                format!("%stack: memref<{count}x{batch}x{rows}x{columns}x{element}, #tpu.memory_space<any>>"),
            );
            windows.insert(at, "{}".to_owned());
        }
        let all = steps_and_number.iter().cloned();
        let all: Vec<String> = all.chain(arguments).chain(scratch).collect();
        let prefetch = match self.entries.is_empty() {
            true => "",
            false => "scalar_prefetch = 1 : i64, ",
        };
        let _ = writeln!(
            text,
            "func.func @main({}) attributes {{iteration_bounds = array<i64: {}>, dimension_semantics = [{}], \
             {prefetch}scratch_operands = {} : i64, window_params = [{}]}} {{",
            all.join(", "),
            steps.join(", "),
            order.join(", "),
            self.scratch.len(),
            windows.join(", ")
        );
        text += "%zero = arith.constant 0 : index\n%none = arith.constant 0 : i32\n";
        text += &places;
        for statement in &self.body {
            self.statement(&mut text, statement);
        }
        text += "return\n}\n";
        for (i, window) in self.windows.iter().enumerate() {
            let mut at = window
                .index
                .map(|g| g.map_or("%none".to_string(), |g| format!("%g{g}")));
            let last = window.array[1] / window.block[0] - 1;
            let neighbour = match window.place {
                Place::Own => None,
                Place::From(first) => Some(format!(
                    "%from = arith.constant {first} : i32\n%row = arith.addi {}, %from : i32\n",
                    at[1]
                )),
                Place::Before(blocks) => Some(format!(
                    "%each = arith.constant {blocks} : i32\n%one = arith.constant 1 : i32\n\
                     %first = arith.muli {}, %each : i32\n%before = arith.subi %first, %one : i32\n\
                     %row = arith.maxsi %before, %none : i32\n",
                    at[1]
                )),
                Place::Behind(blocks) => Some(format!(
                    "%each = arith.constant {blocks} : i32\n%last = arith.constant {last} : i32\n\
                     %first = arith.muli {}, %each : i32\n%behind = arith.addi %first, %each : i32\n\
                     %row = arith.minsi %behind, %last : i32\n",
                    at[1]
                )),
            };
            if neighbour.is_some() {
                at[1] = "%row".to_string();
            }
            let mut neighbour = neighbour.unwrap_or_default();
            if window.first_column > 0 {
                let _ = writeln!(
                    neighbour,
                    "%beside = arith.constant {} : i32\n%column = arith.addi {}, %beside : i32",
                    window.first_column, at[2]
                );
                at[2] = "%column".to_string();
            }
            let load = match self.entries.contains(&i) {
                true => {
                    "%word = arith.constant 0 : index\n\
                     %entry = memref.load %number[%word] : memref<1xi32, #tpu.memory_space<smem>>\n"
                }
                false => "",
            };
            let types = format!("{}i32, i32, i32", self.entry("i32, ", i));
            let _ = writeln!(
                text,
                "func.func @at{i}({}) -> ({types}) {{\n%none = arith.constant 0 : i32\n{places}{neighbour}{load}\
                 return {}{} : {types}\n}}",
                steps_and_number.join(", "),
                self.entry("%entry, ", i),
                at.join(", ")
            );
        }
        text + "}\n"
    }

    /// What stands for the entry in lists of a window's dimensions: `one`, if it is of a stack.
    fn entry<'t>(&self, one: &'t str, window: usize) -> &'t str {
        match self.entries.contains(&window) {
            true => one,
            false => "",
        }
    }

    pub(super) fn memref(&self, window: usize) -> String {
        let entry = self.entry("1x", window);
        let Window {
            dtype,
            block: [rows, columns],
            ..
        } = self.windows[window];
        let sizes = format!("{entry}1x{rows}x{columns}");
        match dtype {
            DType::U32 => format!("memref<{sizes}xi32, #tpu.memory_space<smem>>"),
            dtype => format!("memref<{sizes}x{}>", element(dtype)),
        }
    }

    /// The type of a part of a window's block that is this vector.
    fn part_of(&self, window: usize, vector: &str) -> String {
        vector.replace("vector<", &format!("vector<{}1x", self.entry("1x", window)))
    }

    /// The step's place along a dimension of the grid, which `%g` may be the number of a block instead of.
    fn own_place(&self, dim: usize) -> String {
        match self.shared && dim + 1 == self.grid.len() {
            true => format!("%own{dim}"),
            false => format!("%g{dim}"),
        }
    }

    /// The grid as Mosaic counts it.
    fn steps(&self) -> Steps {
        let mut steps = Steps {
            arguments: (0..self.grid.len())
                .map(|dim| format!("%g{dim}: i32"))
                .collect(),
            bounds: self.grid.iter().map(ToString::to_string).collect(),
            order: (0..self.grid.len())
                .map(|dim| self.ordered.contains(&dim))
                .map(semantics)
                .collect(),
            places: String::new(),
        };
        if let (true, &[.., _, last]) = (self.shared, &self.grid[..]) {
            let inner = self.grid.len() - 1;
            let outer = inner - 1;
            steps.arguments[inner] = format!("%own{inner}: i32");
            steps.places = format!(
                "%count = arith.constant {last} : i32\n%before = arith.muli %g{outer}, %count : i32\n\
                 %g{inner} = arith.addi %before, %own{inner} : i32\n"
            );
        } else if let (true, &[.., first, last]) = (self.joined, &self.grid[..]) {
            let dim = self.grid.len() - 2;
            let inner = dim + 1;
            let is_ordered = [dim, inner].iter().any(|dim| self.ordered.contains(dim));
            steps.arguments.truncate(dim);
            steps.arguments.push("%both: i32".to_owned());
            steps.bounds.truncate(dim);
            steps.bounds.push((first * last).to_string());
            steps.order.truncate(dim);
            steps.order.push(semantics(is_ordered));
            steps.places = format!(
                "%count = arith.constant {last} : i32\n%g{dim} = arith.divsi %both, %count : i32\n\
                 %g{inner} = arith.remsi %both, %count : i32\n"
            );
        }
        steps
    }

    fn vector(&self, value: Value) -> String {
        vector(self.type_of(value))
    }

    fn statement(&self, text: &mut String, statement: &Statement) {
        let result = statement.results.first().copied();
        let name = result.map_or_else(String::new, name);
        let of = result.map_or_else(String::new, |v| self.vector(v));
        let line = match &statement.op {
            Op::Splat(number) => match result.map(|v| self.type_of(v)) {
                Some(Type::Matrix {
                    dtype: DType::S32 | DType::S8,
                    ..
                }) => format!("{name} = arith.constant dense<{}> : {of}", *number as i64),
                Some(Type::Matrix {
                    dtype: DType::BF16, ..
                }) => format!(
                    "{name} = arith.constant dense<{:#06X}> : {of}",
                    bf16::from_f64(*number).to_bits()
                ),
                _ => format!(
                    "{name} = arith.constant dense<{:#010X}> : {of}",
                    (*number as f32).to_bits()
                ),
            },
            Op::Columns => format!("{name} = tpu.iota {{dimensions = array<i32: 1>}} : {of}"),
            Op::Rows(count) => {
                let [op, operand] = match count.is_power_of_two() {
                    true => ["andi", &(count - 1).to_string()],
                    false => ["remsi", &count.to_string()],
                };
                format!(
                    "{name}_i = tpu.iota {{dimensions = array<i32: 0>}} : {of}\n\
                     {name}_n = arith.constant dense<{operand}> : {of}\n\
                     {name} = arith.{op} {name}_i, {name}_n : {of}"
                )
            }
            Op::Row { counter, start } => match counter {
                None => format!("{name} = arith.constant {start} : index"),
                Some((counter, step)) => format!(
                    "{name}_s = arith.constant {step} : i32\n{name}_m = arith.muli {}, {name}_s : i32\n\
                     {name}_c = arith.constant {start} : i32\n{name}_a = arith.addi {name}_m, {name}_c : i32\n\
                     {name} = arith.index_cast {name}_a : i32 to index",
                    match counter {
                        Counter::Trips(value) => self::name(*value),
                        Counter::Steps(dim) => format!("%g{dim}"),
                    }
                ),
            },
            Op::Load {
                window,
                row,
                column,
            } => {
                let memory = self.memref(*window);
                let block = self.part_of(*window, &of);
                let entry = self.entry("%zero, ", *window);
                format!(
                    "{name}_c = arith.constant {column} : index\n\
                     {name}_b = vector.load %w{window}[{entry}%zero, {}, {name}_c] : {memory}, {block}\n\
                     {name} = vector.shape_cast {name}_b : {block} to {of}",
                    self::name(*row)
                )
            }
            Op::Store(value, row, column) => {
                let (window, x) = (self.windows.len() - 1, self::name(*value));
                let memory = self.memref(window);
                let of = self.vector(*value);
                let block = self.part_of(window, &of);
                let entry = self.entry("%zero, ", window);
                // One value may go to several places.
                let place = format!("{x}_r{}", row.0);
                format!(
                    "{place}_b = vector.shape_cast {x} : {of} to {block}\n\
                     {place}_c = arith.constant {column} : index\n\
                     vector.store {place}_b, %w{window}[{entry}%zero, {}, {place}_c] : {memory}, {block}",
                    self::name(*row)
                )
            }
            Op::Kept(scratch, row, column) => {
                let (at, memory) = (scratch.0, memory(self.scratch[scratch.0]));
                format!(
                    "{name}_c = arith.constant {column} : index\n\
                     {name} = vector.load %s{at}[{}, {name}_c] : {memory}, {of}",
                    self::name(*row)
                )
            }
            Op::Keep(scratch, value, row, column) => {
                let (at, memory) = (scratch.0, memory(self.scratch[scratch.0]));
                let (x, of) = (self::name(*value), self.vector(*value));
                // One value may go to several places.
                let place = format!("{x}_s{at}_r{}_c", row.0);
                format!(
                    "{place} = arith.constant {column} : index\n\
                     vector.store {x}, %s{at}[{}, {place}] : {memory}, {of}",
                    self::name(*row)
                )
            }
            Op::KeepColumns(scratch, value, [row, column]) => {
                let (at, memory) = (scratch.0, memory(self.scratch[scratch.0]));
                let (x, of) = (self::name(*value), self.vector(*value));
                let place = format!("{x}_s{at}_r{}_c{}", row.0, column.0);
                format!(
                    "{place} = \"tpu.assume_multiple\"({}) {{multiple = {LANES} : i32}} : (index) -> index\n\
                     vector.store {x}, %s{at}[{}, {place}] : {memory}, {of}",
                    self::name(*column),
                    self::name(*row)
                )
            }
            Op::When {
                dims,
                place,
                is,
                body,
            } => {
                let relation = if *is { "eq" } else { "ne" };
                // Names inside one are not seen in another.
                let condition = format!("%at{place}_{}", text.len());
                let mut sum = "%none".to_owned();
                for dim in dims {
                    let next = format!("{condition}_g{dim}");
                    let own = self.own_place(*dim);
                    let _ = writeln!(text, "{next} = arith.addi {sum}, {own} : i32");
                    sum = next;
                }
                let _ = writeln!(
                    text,
                    "{condition}_p = arith.constant {place} : i32\n\
                     {condition} = arith.cmpi {relation}, {sum}, {condition}_p : i32\nscf.if {condition} {{"
                );
                for statement in body {
                    self.statement(text, statement);
                }
                "scf.yield\n}".to_string()
            }
            Op::Unary(op, x) => {
                let x = self::name(*x);
                let op = match op {
                    Unary::Abs => "absf",
                    Unary::Exp2 => "exp2",
                    Unary::Reciprocal => {
                        let line =
                            format!("{name} = tpu.reciprocal {x} {{approx = true}} : {of} -> {of}");
                        let _ = writeln!(text, "{line}");
                        return;
                    }
                    Unary::Rsqrt => "rsqrt",
                };
                format!("{name} = math.{op} {x} : {of}")
            }
            Op::Binary(op, a, b) => {
                let op = match op {
                    Binary::Add if self.dtype_of(*a) == Some(DType::S32) => "addi",
                    Binary::Add => "addf",
                    Binary::Sub => "subf",
                    Binary::Mul => "mulf",
                    Binary::Div => "divf",
                    Binary::Max => "maximumf",
                    Binary::Min => "minimumf",
                };
                let [a, b] = [*a, *b].map(self::name);
                format!("{name} = arith.{op} {a}, {b} : {of}")
            }
            Op::Less(a, b) => format!(
                "{name} = arith.cmpi slt, {}, {} : {}",
                self::name(*a),
                self::name(*b),
                self.vector(*a)
            ),
            Op::Equal(a, b) => format!(
                "{name} = arith.cmpf oeq, {}, {} : {}",
                self::name(*a),
                self::name(*b),
                self.vector(*a)
            ),
            Op::Select(operands) => {
                let [condition, a, b] = operands.map(self::name);
                let predicate = self.vector(operands[0]);
                format!("{name} = arith.select {condition}, {a}, {b} : {predicate}, {of}")
            }
            Op::Convert(x) => {
                let to = result.and_then(|v| self.dtype_of(v));
                let op = match [self.dtype_of(*x), to] {
                    [Some(DType::S32), _] => "sitofp",
                    [_, Some(DType::BF16)] => "truncf",
                    _ => "extf",
                };
                let from = self.vector(*x);
                let own = self::name(*x);
                match (self.dtype_of(*x), to) {
                    // The chip converts integers of 32 bits.
                    (Some(narrow @ (DType::S8 | DType::S4)), Some(DType::F32)) => {
                        let wide = from.replace(&element(narrow), &element(DType::S32));
                        format!(
                            "{name}_i = arith.extsi {own} : {from} to {wide}\n\
                             {name} = arith.sitofp {name}_i : {wide} to {of}"
                        )
                    }
                    (Some(DType::BF16), Some(DType::S8)) => {
                        format!("{name} = tpu.fptosi {own} {TO_NEAREST} : {from} -> {of}")
                    }
                    // Of f32 only integers of 32 bits are made.
                    (_, Some(DType::S8)) => {
                        let wide = of.replace(&element(DType::S8), &element(DType::S32));
                        format!(
                            "{name}_i = tpu.fptosi {own} {TO_NEAREST} : {from} -> {wide}\n\
                             {name} = arith.trunci {name}_i : {wide} to {of}"
                        )
                    }
                    _ => format!("{name} = arith.{op} {own} : {from} to {of}"),
                }
            }
            Op::Reduce(kind, x) => {
                let (kind, start) = reduction(*kind);
                let column = of.replace("x1x", "x");
                let from = self.vector(*x);
                format!(
                    "{name}_i = arith.constant dense<{start}> : {column}\n\
                     {name}_r = vector.multi_reduction <{kind}>, {}, {name}_i [1] : {from} to {column}\n\
                     {name} = vector.shape_cast {name}_r : {column} to {of}",
                    self::name(*x)
                )
            }
            Op::ReduceRows(kind, x) => {
                let (kind, start) = reduction(*kind);
                let row = of.replacen("<1x", "<", 1);
                let from = self.vector(*x);
                format!(
                    "{name}_i = arith.constant dense<{start}> : {row}\n\
                     {name}_r = vector.multi_reduction <{kind}>, {}, {name}_i [0] : {from} to {row}\n\
                     {name} = vector.shape_cast {name}_r : {row} to {of}",
                    self::name(*x)
                )
            }
            Op::Transpose(x) => {
                let from = self.vector(*x);
                format!(
                    "{name} = vector.transpose {}, [1, 0] : {from} to {of}",
                    self::name(*x)
                )
            }
            Op::Broadcast(x) => {
                let from = self.vector(*x);
                format!(
                    "{name} = vector.broadcast {} : {from} to {of}",
                    self::name(*x)
                )
            }
            Op::Slice(x, [row, column]) => {
                let from = self.vector(*x);
                let [rows, columns] = result.map_or([1, 1], |v| self.size(v));
                format!(
                    "{name} = \"vector.extract_strided_slice\"({}) {{offsets = [{row}, {column}], \
                     sizes = [{rows}, {columns}], strides = [1, 1]}} : ({from}) -> {of}",
                    self::name(*x)
                )
            }
            Op::Rotate(x, count) => format!(
                "{name}_n = arith.constant {count} : i32\n\
                 {name} = \"tpu.dynamic_rotate\"({}, {name}_n) {{dimension = 1 : si32}} : ({of}, i32) -> {of}",
                self::name(*x)
            ),
            Op::Interleave([even, odd]) => {
                let from = self.vector(*even);
                let [wide, bits] = ["xf32>", "xi32>"].map(|to| from.replace("xbf16>", to));
                // Two rows share a register's lanes: the first is the lower half of 32 bits. A value in f32 is the upper.
                format!(
                    "{name}_e = arith.extf {} : {from} to {wide}\n\
                     {name}_o = arith.extf {} : {from} to {wide}\n\
                     {name}_l = tpu.bitcast {name}_e : {wide} -> {bits}\n\
                     {name}_u = tpu.bitcast {name}_o : {wide} -> {bits}\n\
                     {name}_n = arith.constant dense<16> : {bits}\n\
                     {name}_s = arith.shrui {name}_l, {name}_n : {bits}\n\
                     {name}_b = arith.ori {name}_u, {name}_s : {bits}\n\
                     {name} = tpu.bitcast {name}_b : {bits} -> {of}",
                    self::name(*even),
                    self::name(*odd)
                )
            }
            Op::Noise(noise) => {
                if let Some(value) = result {
                    self.noise_text(text, *noise, value);
                }
                return;
            }
            Op::MatMul {
                lhs,
                rhs,
                transpose_rhs,
                start,
            } => {
                let numbers = match transpose_rhs {
                    true => "[1],[1],[0],[0],[0,0,1,0],[],[]",
                    false => "[1],[0],[0],[1],[0,0,1,1],[],[]",
                };
                format!(
                    "{name} = tpu.matmul {}, {}, {} {{dimension_numbers = #tpu.dot_dimension_numbers<{numbers}>, \
                     transpose_lhs_hint = false}} : {}, {}, {of} -> {of}",
                    self::name(*lhs),
                    self::name(*rhs),
                    self::name(*start),
                    self.vector(*lhs),
                    self.vector(*rhs)
                )
            }
            Op::Repeat {
                trips,
                counter,
                start,
                carry,
                body,
                next,
            } => {
                return self.repetition(
                    text,
                    &statement.results,
                    *trips,
                    *counter,
                    [start, carry, next],
                    body,
                );
            }
        };
        text.push_str(&line);
        text.push('\n');
    }

    fn repetition(
        &self,
        text: &mut String,
        results: &[Value],
        trips: usize,
        counter: Value,
        [start, carry, next]: [&Vec<Value>; 3],
        body: &[Statement],
    ) {
        let loop_name = name(counter);
        let types: Vec<String> = carry.iter().map(|v| self.vector(*v)).collect();
        let types = types.join(", ");
        let pairs = carry.iter().zip(start);
        let pairs: Vec<String> = pairs
            .map(|(c, s)| format!("{} = {}", name(*c), name(*s)))
            .collect();
        let names: Vec<String> = results.iter().map(|v| name(*v)).collect();
        let (target, carried, yielded) = match carry.is_empty() {
            true => Default::default(),
            false => (
                format!("{} = ", names.join(", ")),
                format!(" iter_args({}) -> ({types})", pairs.join(", ")),
                {
                    let next: Vec<String> = next.iter().map(|v| name(*v)).collect();
                    format!(" {} : {types}", next.join(", "))
                },
            ),
        };
        let _ = writeln!(
            text,
            "{loop_name}_l = arith.constant 0 : i32\n{loop_name}_u = arith.constant {trips} : i32\n\
             {loop_name}_s = arith.constant 1 : i32\n\
             {target}scf.for {loop_name} = {loop_name}_l to {loop_name}_u step {loop_name}_s{carried} : i32 {{"
        );
        for statement in body {
            self.statement(text, statement);
        }
        let _ = writeln!(text, "scf.yield{yielded}\n}}");
    }
}

/// How Mosaic counts the steps of a grid.
struct Steps {
    /// Of the functions that see a step's place.
    arguments: Vec<String>,
    bounds: Vec<String>,
    /// Whether steps of each dimension run in order.
    order: Vec<&'static str>,
    /// Operations that give the place along each dimension of the kernel's own grid.
    places: String,
}

/// What MLIR calls a reduction, and where it starts.
fn reduction(kind: Reduction) -> (&'static str, &'static str) {
    match kind {
        Reduction::Sum => ("add", "0.0"),
        Reduction::Max => ("maximumf", "0xFF800000"),
    }
}

fn semantics(is_ordered: bool) -> &'static str {
    match is_ordered {
        true => "#tpu.dimension_semantics<arbitrary>",
        false => "#tpu.dimension_semantics<parallel>",
    }
}

pub(super) fn vector(of: Type) -> String {
    match of {
        Type::Row => "index".to_string(),
        Type::Matrix {
            dtype,
            rows,
            columns,
        } => format!("vector<{rows}x{columns}x{}>", element(dtype)),
    }
}

/// The type of a memory for one matrix.
fn memory(of: Type) -> String {
    vector(of).replacen("vector<", "memref<", 1)
}

pub(super) fn name(value: Value) -> String {
    format!("%v{}", value.0)
}

fn element(dtype: DType) -> String {
    match dtype {
        DType::Pred => "i1".to_string(),
        DType::S8 => "i8".to_string(),
        DType::S4 => "i4".to_string(),
        DType::S32 => "i32".to_string(),
        float => float.to_string(),
    }
}
