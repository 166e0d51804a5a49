//! The text of a kernel, in Triton's dialect of MLIR.

use std::fmt::Write;

use crate::dtype::DType;
use crate::graph::Comparison;

use super::{Binary, Kernel, Op, Type, Unary, Value};

/// Bytes that arrays begin at a multiple of: XLA allocates so.
const ALIGNMENT: usize = 16;

impl Kernel {
    /// A module with the one function `name`.
    pub fn text(&self, name: &str) -> String {
        let arguments = self.arguments.iter().enumerate().map(|(i, dtype)| {
            let pointer = pointer(*dtype);
            format!("%a{i}: {pointer} {{tt.divisibility = {ALIGNMENT} : i32}}")
        });
        let arguments: Vec<String> = arguments.collect();
        let mut text = format!(
            "module {{\n  tt.func public @{name}({}) attributes {{noinline = false}} {{\n",
            arguments.join(", ")
        );
        for (i, statement) in self.body.iter().enumerate() {
            self.statement(&mut text, i, &statement.op, statement.result);
        }
        text.push_str("    tt.return\n  }\n}\n");
        text
    }

    fn statement(&self, text: &mut String, number: usize, op: &Op, result: Option<Value>) {
        let name = result.map_or_else(String::new, |value| format!("%{}", value.0));
        let of = result.map(|value| self.of(value));
        let result_type = of.map_or_else(String::new, written);
        let operand = |value: &Value| format!("%{}", value.0);
        let type_of = |value: &Value| written(self.of(*value));
        let line = match op {
            Op::Number(number) => {
                let literal = of.map_or_else(String::new, |of| literal(*number, of));
                format!("{name} = arith.constant {literal} : {result_type}")
            }
            Op::Program => format!("{name} = tt.get_program_id x : i32"),
            Op::Count => {
                let count = of.map_or(0, |of| of.dims[0]);
                format!(
                    "{name} = tt.make_range {{end = {count} : i32, start = 0 : i32}} : {result_type}"
                )
            }
            Op::Spread(x) => {
                let (x, from) = (operand(x), type_of(x));
                format!("{name} = tt.splat {x} : {from} -> {result_type}")
            }
            Op::OfRows(x) | Op::OfColumns(x) => {
                let vector = self.of(*x);
                let (axis, dims) = match op {
                    Op::OfRows(_) => (1, vec![vector.dims[0], 1]),
                    _ => (0, vec![1, vector.dims[0]]),
                };
                let thin = written(&Type {
                    dtype: vector.dtype,
                    dims,
                });
                let (x, from) = (operand(x), type_of(x));
                format!(
                    "%e{number} = tt.expand_dims {x} {{axis = {axis} : i32}} : {from} -> {thin}\n    \
                     {name} = tt.broadcast %e{number} : {thin} -> {result_type}"
                )
            }
            Op::Unary(kind, x) => match function(*kind) {
                Function::Operation(function) => {
                    format!("{name} = {function} {} : {result_type}", operand(x))
                }
                Function::Library(symbol) => format!(
                    "{name} = tt.extern_elementwise {} {{libname = \"\", libpath = \"\", pure = true, \
                     symbol = \"{symbol}\"}} : ({result_type}) -> {result_type}",
                    operand(x)
                ),
            },
            Op::Binary(kind, [x, y]) => {
                let is_float = of.is_some_and(|of| of.dtype.is_float());
                let kind = binary(*kind, is_float);
                format!(
                    "{name} = {kind} {}, {} : {result_type}",
                    operand(x),
                    operand(y)
                )
            }
            Op::Compare(kind, [x, y]) => {
                let kind = comparison(*kind);
                let from = type_of(x);
                format!(
                    "{name} = arith.cmpf {kind}, {}, {} : {from}",
                    operand(x),
                    operand(y)
                )
            }
            Op::Select([predicate, yes, no]) => {
                let is = type_of(predicate);
                let [predicate, yes, no] = [predicate, yes, no].map(operand);
                format!("{name} = arith.select {predicate}, {yes}, {no} : {is}, {result_type}")
            }
            Op::Convert(x) => {
                let to = of.map_or(DType::F32, |of| of.dtype);
                let conversion = conversion(self.dtype(*x), to);
                let (x, from) = (operand(x), type_of(x));
                // MLIR's own conversions know no 8-bit floats.
                match to {
                    DType::F8E4M3Fn | DType::F8E5M2 => format!(
                        "{name} = tt.fp_to_fp {x}, rounding = rtne : {from} -> {result_type}"
                    ),
                    _ => format!("{name} = {conversion} {x} : {from} to {result_type}"),
                }
            }
            Op::Reduce(kind, x) => {
                let element = element(self.dtype(*x));
                let combined = binary(*kind, self.dtype(*x).is_float());
                let (x, from) = (operand(x), type_of(x));
                format!(
                    "{name} = \"tt.reduce\"({x}) <{{axis = 1 : i32}}> ({{\n    \
                     ^bb0(%l{number}: {element}, %r{number}: {element}):\n      \
                     %c{number} = {combined} %l{number}, %r{number} : {element}\n      \
                     tt.reduce.return %c{number} : {element}\n    }}) : ({from}) -> {result_type}"
                )
            }
            Op::Load { argument, places } => {
                let (address, pointers) = self.address(text, number, *argument, *places);
                format!("{name} = tt.load {address} : {pointers}")
            }
            Op::Store {
                argument,
                places,
                value,
            } => {
                let (address, pointers) = self.address(text, number, *argument, *places);
                format!("tt.store {address}, {} : {pointers}", operand(value))
            }
        };
        let _ = writeln!(text, "    {line}");
    }

    /// The pointers to places of an argument, and their type.
    fn address(
        &self,
        text: &mut String,
        number: usize,
        argument: usize,
        places: Value,
    ) -> (String, String) {
        let pointer = pointer(self.arguments[argument]);
        let of = self.of(places);
        let pointers = tensor(&of.dims, &pointer);
        let integers = written(of);
        let _ = writeln!(
            text,
            "    %s{number} = tt.splat %a{argument} : {pointer} -> {pointers}\n    \
             %p{number} = tt.addptr %s{number}, %{} : {pointers}, {integers}",
            places.0
        );
        (format!("%p{number}"), pointers)
    }
}

fn pointer(dtype: DType) -> String {
    format!("!tt.ptr<{}>", element(dtype))
}

fn tensor(dims: &[usize], element: &str) -> String {
    let sizes: String = dims.iter().map(|size| format!("{size}x")).collect();
    format!("tensor<{sizes}{element}>")
}

fn written(of: &Type) -> String {
    match of.dims[..] {
        [] => element(of.dtype).to_owned(),
        _ => tensor(&of.dims, element(of.dtype)),
    }
}

fn element(dtype: DType) -> &'static str {
    match dtype {
        DType::Pred => "i1",
        DType::S8 => "i8",
        DType::S32 => "i32",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        DType::F8E4M3Fn => "f8E4M3FN",
        DType::F8E5M2 => "f8E5M2",
        _ => "f32",
    }
}

/// MLIR reads the bits of a float exactly, in hexadecimal.
fn literal(number: f64, of: &Type) -> String {
    let number = match of.dtype {
        DType::F32 => format!("{:#010X}", (number as f32).to_bits()).replace("0X", "0x"),
        _ => (number as i64).to_string(),
    };
    match of.dims[..] {
        [] => number,
        _ => format!("dense<{number}>"),
    }
}

enum Function {
    Operation(&'static str),
    /// Of CUDA's library for devices, where Triton's lowering has no operation.
    Library(&'static str),
}

fn function(kind: Unary) -> Function {
    match kind {
        Unary::Abs => Function::Operation("math.absf"),
        Unary::Exp => Function::Operation("math.exp"),
        Unary::RoundNearestEven => Function::Library("__nv_rintf"),
        Unary::Rsqrt => Function::Operation("math.rsqrt"),
        Unary::Sqrt => Function::Operation("math.sqrt"),
        Unary::Tanh => Function::Library("__nv_tanhf"),
    }
}

fn binary(kind: Binary, is_float: bool) -> &'static str {
    match (kind, is_float) {
        (Binary::Add, true) => "arith.addf",
        (Binary::Add, false) => "arith.addi",
        (Binary::Div, true) => "tt.precise_divf",
        (Binary::DivNearly, true) => "arith.divf",
        (Binary::Div | Binary::DivNearly, false) => "arith.divsi",
        (Binary::Max, true) => "arith.maximumf",
        (Binary::Max, false) => "arith.maxsi",
        (Binary::Min, true) => "arith.minimumf",
        (Binary::Min, false) => "arith.minsi",
        (Binary::Mul, true) => "arith.mulf",
        (Binary::Mul, false) => "arith.muli",
        (Binary::Sub, true) => "arith.subf",
        (Binary::Sub, false) => "arith.subi",
    }
}

/// Of floats; what is compared with a NaN is unequal and neither less nor greater.
fn comparison(kind: Comparison) -> &'static str {
    match kind {
        Comparison::Eq => "oeq",
        Comparison::Ne => "une",
        Comparison::Lt => "olt",
        Comparison::Le => "ole",
        Comparison::Gt => "ogt",
        Comparison::Ge => "oge",
    }
}

fn conversion(from: DType, to: DType) -> &'static str {
    match (from.is_float(), to.is_float()) {
        (true, true) if from.bits() < to.bits() => "arith.extf",
        (true, true) => "arith.truncf",
        (true, false) => "arith.fptosi",
        (false, true) => "arith.sitofp",
        (false, false) if from.bits() < to.bits() => "arith.extsi",
        (false, false) => "arith.trunci",
    }
}
