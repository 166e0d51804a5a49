//! Kernels on the host: what the text means, for tests against the graphs that they stand for.

use crate::graph::eval::{Data, Value as GraphValue, round_float};
use crate::shape::Shape;

use super::{Binary, Kernel, Op, Unary, Value};

/// What a call of `kernel` gives for values of a graph: its results, of these shapes.
pub fn evaluated(kernel: &Kernel, operands: &[&GraphValue], results: &[Shape]) -> Vec<GraphValue> {
    let operands = operands.iter().map(|operand| {
        let elements = 0..operand.shape.count();
        elements.map(|i| operand.float(i)).collect()
    });
    // What is never stored is not a number, so that a test finds it.
    let results_before = results.iter().map(|shape| vec![f64::NAN; shape.count()]);
    let mut arrays: Vec<Vec<f64>> = operands.chain(results_before).collect();
    for program in 0..kernel.programs {
        kernel.run(program, &mut arrays);
    }
    let stored = arrays.split_off(arrays.len() - results.len());
    let value = |(shape, data): (&Shape, Vec<f64>)| GraphValue {
        shape: shape.clone(),
        data: match shape.dtype.is_float() {
            true => Data::F(data),
            false => Data::I(data.into_iter().map(|x| x as i64).collect()),
        },
    };
    results.iter().zip(stored).map(value).collect()
}

impl Kernel {
    /// One program.
    fn run(&self, program: usize, arrays: &mut [Vec<f64>]) {
        let mut values: Vec<Vec<f64>> = vec![Vec::new(); self.types.len()];
        for statement in &self.body {
            if let Op::Store {
                argument,
                places,
                value,
            } = &statement.op
            {
                let places = &values[places.0];
                for (place, x) in places.iter().zip(&values[value.0]) {
                    arrays[*argument][*place as usize] = *x;
                }
            }
            if let Some(result) = statement.result {
                values[result.0] = self.value(&statement.op, result, program, &values, arrays);
            }
        }
    }

    fn value(
        &self,
        op: &Op,
        result: Value,
        program: usize,
        values: &[Vec<f64>],
        arrays: &[Vec<f64>],
    ) -> Vec<f64> {
        let of = self.of(result);
        let count: usize = of.dims.iter().product();
        let columns = of.dims.get(1).copied().unwrap_or(1);
        let get = |value: &Value| &values[value.0];
        let exact: Vec<f64> = match op {
            Op::Number(number) => vec![*number; count],
            Op::Program => vec![program as f64],
            Op::Count => (0..count).map(|i| i as f64).collect(),
            Op::Spread(x) => vec![get(x)[0]; count],
            Op::OfRows(x) => (0..count).map(|i| get(x)[i / columns]).collect(),
            Op::OfColumns(x) => (0..count).map(|i| get(x)[i % columns]).collect(),
            Op::Unary(kind, x) => get(x).iter().map(|x| unary(*kind, *x)).collect(),
            Op::Binary(kind, [x, y]) => {
                let pairs = get(x).iter().zip(get(y));
                pairs.map(|(x, y)| binary(*kind, *x, *y)).collect()
            }
            Op::Compare(kind, [x, y]) => {
                let pairs = get(x).iter().zip(get(y));
                pairs
                    .map(|(x, y)| f64::from(u8::from(kind.holds(*x, *y))))
                    .collect()
            }
            Op::Select([predicate, yes, no]) => {
                let branches = get(yes).iter().zip(get(no));
                let chosen = get(predicate).iter().zip(branches);
                chosen
                    .map(|(is, (yes, no))| if *is != 0.0 { *yes } else { *no })
                    .collect()
            }
            Op::Convert(x) => get(x).clone(),
            Op::Reduce(kind, x) => {
                let columns = self.of(*x).dims[1];
                let rows = get(x).chunks(columns);
                let combined = |row: &[f64]| row.iter().copied().reduce(|x, y| binary(*kind, x, y));
                rows.map(|row| combined(row).unwrap_or_default()).collect()
            }
            Op::Load { argument, places } => {
                let array = &arrays[*argument];
                get(places)
                    .iter()
                    .map(|place| array[*place as usize])
                    .collect()
            }
            Op::Store { .. } => Vec::new(),
        };
        // As their type holds them.
        let held = |x: f64| match of.dtype.is_float() {
            true => round_float(of.dtype, x),
            false => x.trunc(),
        };
        exact.into_iter().map(held).collect()
    }
}

fn unary(kind: Unary, x: f64) -> f64 {
    match kind {
        Unary::Abs => x.abs(),
        Unary::Exp => x.exp(),
        Unary::RoundNearestEven => x.round_ties_even(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Sqrt => x.sqrt(),
        Unary::Tanh => x.tanh(),
    }
}

fn binary(kind: Binary, x: f64, y: f64) -> f64 {
    match kind {
        Binary::Add => x + y,
        Binary::Div | Binary::DivNearly => x / y,
        Binary::Max if x.is_nan() || y.is_nan() => f64::NAN,
        Binary::Max => x.max(y),
        Binary::Min if x.is_nan() || y.is_nan() => f64::NAN,
        Binary::Min => x.min(y),
        Binary::Mul => x * y,
        Binary::Sub => x - y,
    }
}
