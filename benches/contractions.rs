//! Times the ways to write one contraction against each other on the CPU plugin, in turns.
//!
//! `cargo bench --bench contractions -- [--rounds N] [name part]...`
//!
//! Each line gives the minimum and the median milliseconds of a run, and the ratio of the first way's minimum to this one's.
//! This tool chose the rules of `maxdiff::backend::cpu`; `docs/performance-how.md` has its results.

use std::error::Error;
use std::time::Instant;

use maxdiff::dtype::DType;
use maxdiff::emit::{EmitOptions, stablehlo};
use maxdiff::graph::{Builder, ConvDims, ConvLayout, DotDims, Graph, GraphError, PadDim, Tensor};
use maxdiff::host_tensor::HostTensor;
use maxdiff::pjrt::install::{PluginKind, locate};
use maxdiff::pjrt::{Arg, Buffer, Client, CompileOptions, ElementType, NamedValue, Plugin};
use maxdiff::shape::Shape;

type Made = Result<Tensor, GraphError>;

/// One image size and channel count of a convolution of 3x3 with stride 1.
#[derive(Clone, Copy)]
struct Size {
    batch: usize,
    side: usize,
    input: usize,
    output: usize,
}

struct Way {
    label: &'static str,
    graph: Graph,
}

struct Case {
    name: String,
    flops: f64,
    ways: Vec<Way>,
}

fn way(
    label: &'static str,
    inputs: &[(DType, Vec<usize>)],
    make: impl Fn(&Builder, &[Tensor]) -> Made,
) -> Result<Way, GraphError> {
    let b = Builder::new();
    let tensors = inputs
        .iter()
        .enumerate()
        .map(|(i, (dtype, dims))| b.input(&format!("x{i}"), Shape::new(*dtype, dims.clone()), &[]))
        .collect::<Result<Vec<_>, _>>()?;
    let y = make(&b, &tensors)?;
    b.output("y", y, None)?;
    Ok(Way {
        label,
        graph: b.finish(),
    })
}

fn channels_last_conv(kernel: ConvLayout) -> ConvDims {
    ConvDims {
        lhs: ConvLayout::channels_last(2),
        rhs: kernel,
        out: ConvLayout::channels_last(2),
        strides: vec![1; 2],
        padding: vec![(1, 1); 2],
        lhs_dilation: vec![1; 2],
        rhs_dilation: vec![1; 2],
        feature_groups: 1,
        batch_groups: 1,
    }
}

/// `[0, 1, i, o]`
fn hwio() -> ConvLayout {
    ConvLayout {
        batch: 3,
        feature: 2,
        spatial: vec![0, 1],
    }
}

fn matmul(b: &Builder, x: Tensor, y: Tensor, xc: usize, yc: usize, result: DType) -> Made {
    b.dot_general(
        x,
        y,
        DotDims {
            lhs_contract: vec![xc],
            rhs_contract: vec![yc],
            ..DotDims::default()
        },
        result,
    )
}

/// The nine shifted images, padded by one.
fn taps(b: &Builder, x: Tensor) -> Result<Vec<Tensor>, GraphError> {
    let d = b.dims(x);
    let edge = PadDim {
        low: 1,
        high: 1,
        interior: 0,
    };
    let none = PadDim::default();
    let padded = b.pad(x, 0.0, &[none, edge, edge, none])?;
    let mut out = Vec::new();
    for i in 0..3 {
        for j in 0..3 {
            out.push(b.slice(
                padded,
                &[0, i, j, 0],
                &[d[0], i + d[1], j + d[2], d[3]],
                &[1; 4],
            )?);
        }
    }
    Ok(out)
}

/// `[pixels, 9 channels]`
fn im2col(b: &Builder, x: Tensor) -> Made {
    let d = b.dims(x);
    let columns = b.concatenate(&taps(b, x)?, 3)?;
    b.reshape(columns, &[d[0] * d[1] * d[2], 9 * d[3]])
}

fn rows(b: &Builder, x: Tensor) -> Made {
    let d = b.dims(x);
    b.reshape(x, &[d[0] * d[1] * d[2], d[3]])
}

/// `[9 i, o]` of a kernel `[o, i, 3, 3]`
fn kernel_matrix(b: &Builder, w: Tensor) -> Made {
    let d = b.dims(w);
    let t = b.transpose(w, &[2, 3, 1, 0])?;
    b.reshape(t, &[9 * d[1], d[0]])
}

fn forward(s: Size, dtype: DType, result: DType) -> Result<Case, GraphError> {
    let x = vec![s.batch, s.side, s.side, s.input];
    let oihw = vec![s.output, s.input, 3, 3];
    let inputs = [(dtype, x.clone()), (dtype, oihw)];
    let out = [s.batch, s.side, s.side, s.output];
    let mut ways = vec![
        way("conv oihw", &inputs, |b, t| {
            b.convolution(
                t[0],
                t[1],
                channels_last_conv(ConvLayout::channels_first(2)),
                result,
            )
        })?,
        way("conv hwio", &inputs, |b, t| {
            let w = b.transpose(t[1], &[2, 3, 1, 0])?;
            b.convolution(t[0], w, channels_last_conv(hwio()), result)
        })?,
        way("im2col dot", &inputs, |b, t| {
            let w = kernel_matrix(b, t[1])?;
            let y = matmul(b, im2col(b, t[0])?, w, 1, 0, result)?;
            b.reshape(y, &out)
        })?,
        way("9 dots", &inputs, |b, t| {
            let w = b.transpose(t[1], &[2, 3, 1, 0])?;
            let mut sum = None;
            for (k, tap) in taps(b, t[0])?.into_iter().enumerate() {
                let wk = b.slice(
                    w,
                    &[k / 3, k % 3, 0, 0],
                    &[k / 3 + 1, k % 3 + 1, s.input, s.output],
                    &[1; 4],
                )?;
                let wk = b.reshape(wk, &[s.input, s.output])?;
                let y = matmul(b, rows(b, tap)?, wk, 1, 0, result)?;
                sum = Some(match sum {
                    None => y,
                    Some(z) => b.add(z, y)?,
                });
            }
            let Some(y) = sum else {
                return Err(b.invalid("no taps"));
            };
            b.reshape(y, &out)
        })?,
        way("nchw conv", &inputs, |b, t| {
            let x = b.transpose(t[0], &[0, 3, 1, 2])?;
            let dims = ConvDims {
                lhs: ConvLayout::channels_first(2),
                out: ConvLayout::channels_first(2),
                ..channels_last_conv(ConvLayout::channels_first(2))
            };
            let y = b.convolution(x, t[1], dims, result)?;
            b.transpose(y, &[0, 2, 3, 1])
        })?,
    ];
    if dtype == DType::F32 {
        ways.push(way("im2col bf16 dot", &inputs, |b, t| {
            let x = b.convert(t[0], DType::BF16)?;
            let w = b.convert(kernel_matrix(b, t[1])?, DType::BF16)?;
            let y = matmul(b, im2col(b, x)?, w, 1, 0, result)?;
            b.reshape(y, &out)
        })?);
    }
    Ok(Case {
        name: format!(
            "conv forward {dtype} {}x{1}x{1} {2}->{3}",
            s.batch, s.side, s.input, s.output
        ),
        flops: 18.0 * (s.batch * s.side * s.side * s.input * s.output) as f64,
        ways,
    })
}

fn input_gradient(s: Size, dtype: DType) -> Result<Case, GraphError> {
    let g = vec![s.batch, s.side, s.side, s.output];
    let inputs = [(dtype, g), (dtype, vec![s.output, s.input, 3, 3])];
    let swapped = ConvLayout {
        batch: 1,
        feature: 0,
        spatial: vec![2, 3],
    };
    Ok(Case {
        name: format!(
            "conv input gradient {dtype} {}x{1}x{1} {2}->{3}",
            s.batch, s.side, s.input, s.output
        ),
        flops: 18.0 * (s.batch * s.side * s.side * s.input * s.output) as f64,
        ways: vec![
            way("conv reversed", &inputs, |b, t| {
                let w = b.reverse(t[1], &[2, 3])?;
                b.convolution(t[0], w, channels_last_conv(swapped.clone()), DType::F32)
            })?,
            way("conv hwio", &inputs, |b, t| {
                let w = b.transpose(b.reverse(t[1], &[2, 3])?, &[2, 3, 0, 1])?;
                b.convolution(t[0], w, channels_last_conv(hwio()), DType::F32)
            })?,
            way("im2col dot", &inputs, |b, t| {
                let w = b.transpose(b.reverse(t[1], &[2, 3])?, &[2, 3, 0, 1])?;
                let w = b.reshape(w, &[9 * s.output, s.input])?;
                let y = matmul(b, im2col(b, t[0])?, w, 1, 0, DType::F32)?;
                b.reshape(y, &[s.batch, s.side, s.side, s.input])
            })?,
        ],
    })
}

fn kernel_gradient(s: Size, dtype: DType) -> Result<Case, GraphError> {
    let inputs = [
        (dtype, vec![s.batch, s.side, s.side, s.input]),
        (dtype, vec![s.batch, s.side, s.side, s.output]),
    ];
    // The batch is contracted: it takes the feature's place.
    let contracted = ConvLayout {
        batch: 3,
        feature: 0,
        spatial: vec![1, 2],
    };
    let to_oihw = |b: &Builder, m: Tensor| -> Made {
        let w = b.reshape(m, &[3, 3, s.input, s.output])?;
        b.transpose(w, &[3, 2, 0, 1])
    };
    Ok(Case {
        name: format!(
            "conv kernel gradient {dtype} {}x{1}x{1} {2}->{3}",
            s.batch, s.side, s.input, s.output
        ),
        flops: 18.0 * (s.batch * s.side * s.side * s.input * s.output) as f64,
        ways: vec![
            way("conv", &inputs, |b, t| {
                let dims = ConvDims {
                    lhs: contracted.clone(),
                    rhs: contracted.clone(),
                    out: ConvLayout {
                        batch: 1,
                        feature: 0,
                        spatial: vec![2, 3],
                    },
                    ..channels_last_conv(hwio())
                };
                b.convolution(t[0], t[1], dims, DType::F32)
            })?,
            way("im2col dot", &inputs, |b, t| {
                let y = matmul(b, im2col(b, t[0])?, rows(b, t[1])?, 0, 0, DType::F32)?;
                to_oihw(b, y)
            })?,
            way("im2col dot, g first", &inputs, |b, t| {
                let y = matmul(b, rows(b, t[1])?, im2col(b, t[0])?, 0, 0, DType::F32)?;
                let w = b.reshape(y, &[s.output, 3, 3, s.input])?;
                b.transpose(w, &[0, 3, 1, 2])
            })?,
            way("9 dots", &inputs, |b, t| {
                let g = rows(b, t[1])?;
                let parts = taps(b, t[0])?
                    .into_iter()
                    .map(|tap| matmul(b, rows(b, tap)?, g, 0, 0, DType::F32))
                    .collect::<Result<Vec<_>, _>>()?;
                to_oihw(b, b.concatenate(&parts, 0)?)
            })?,
            way("9 dots, 3 slices", &inputs, |b, t| {
                // The rows of three column shifts; a row shift is a contiguous slice of whole rows.
                let d = b.dims(t[0]);
                let g = rows(b, t[1])?;
                let edge = PadDim {
                    low: 1,
                    high: 1,
                    interior: 0,
                };
                let none = PadDim::default();
                let padded = b.pad(t[0], 0.0, &[none, edge, edge, none])?;
                let mut columns = Vec::new();
                for j in 0..3 {
                    columns.push(b.slice_dim(padded, 2, j, j + d[2])?);
                }
                let wide = b.concatenate(&columns, 3)?;
                let parts = (0..3)
                    .map(|i| {
                        let tap = b.slice_dim(wide, 1, i, i + d[1])?;
                        matmul(b, rows(b, tap)?, g, 0, 0, DType::F32)
                    })
                    .collect::<Result<Vec<_>, _>>()?;
                to_oihw(b, b.concatenate(&parts, 0)?)
            })?,
            way("transposed im2col dot", &inputs, |b, t| {
                // Both operands with the contracted dimension last.
                let x = b.transpose(im2col(b, t[0])?, &[1, 0])?;
                let g = b.transpose(rows(b, t[1])?, &[1, 0])?;
                let x = b.optimization_barrier(&[x, g])?;
                let y = matmul(b, x[0], x[1], 1, 1, DType::F32)?;
                to_oihw(b, y)
            })?,
        ],
    })
}

fn linear(m: usize, k: usize, n: usize) -> Result<Vec<Case>, GraphError> {
    let kinds = [
        ("f32", DType::F32, DType::F32),
        ("bf16", DType::BF16, DType::F32),
        ("s8", DType::S8, DType::S32),
    ];
    let make = |name: &str, x: Vec<usize>, w: Vec<usize>, xc: usize, wc: usize| {
        let mut ways = Vec::new();
        for (label, dtype, result) in kinds {
            ways.push(way(
                label,
                &[(dtype, x.clone()), (dtype, w.clone())],
                |b, t| matmul(b, t[0], t[1], xc, wc, result),
            )?);
        }
        Ok::<_, GraphError>(Case {
            name: format!("dot {name} m{m} k{k} n{n}"),
            flops: 2.0 * (m * k * n) as f64,
            ways,
        })
    };
    let mut weight_gradient = make("weight gradient", vec![m, n], vec![m, k], 0, 0)?;
    for (dtype, result, labels) in [
        (
            DType::F32,
            DType::F32,
            [
                "f32 swapped",
                "f32 in 4",
                "f32 in 16",
                "f32 x transposed",
                "f32 y transposed",
            ],
        ),
        (
            DType::BF16,
            DType::F32,
            [
                "bf16 swapped",
                "bf16 in 4",
                "bf16 in 16",
                "bf16 x transposed",
                "bf16 y transposed",
            ],
        ),
        (
            DType::S8,
            DType::S32,
            [
                "s8 swapped",
                "s8 in 4",
                "s8 in 16",
                "s8 x transposed",
                "s8 y transposed",
            ],
        ),
    ] {
        let inputs = [(dtype, vec![m, n]), (dtype, vec![m, k])];
        weight_gradient.ways.push(way(labels[0], &inputs, |b, t| {
            let y = matmul(b, t[1], t[0], 0, 0, result)?;
            b.transpose(y, &[1, 0])
        })?);
        for (parts, label) in [(4, labels[1]), (16, labels[2])] {
            weight_gradient.ways.push(way(label, &inputs, |b, t| {
                let x = b.reshape(t[0], &[parts, m / parts, n])?;
                let y = b.reshape(t[1], &[parts, m / parts, k])?;
                let y = b.dot_general(
                    x,
                    y,
                    DotDims {
                        lhs_batch: vec![0],
                        rhs_batch: vec![0],
                        lhs_contract: vec![1],
                        rhs_contract: vec![1],
                    },
                    result,
                )?;
                b.sum(y, &[0])
            })?);
        }
        for (first, label) in [(0, labels[3]), (1, labels[4])] {
            weight_gradient.ways.push(way(label, &inputs, |b, t| {
                // What stands between keeps the compiler from folding the transposition into the dot.
                let x = b.transpose(t[first], &[1, 0])?;
                let x = b.clamp(x, -127.0, 127.0)?;
                let y = matmul(b, x, t[1 - first], 1, 0, result)?;
                if first == 0 {
                    Ok(y)
                } else {
                    b.transpose(y, &[1, 0])
                }
            })?);
        }
    }
    Ok(vec![
        make("forward", vec![m, k], vec![n, k], 1, 1)?,
        make("forward, weight [k, n]", vec![m, k], vec![k, n], 1, 0)?,
        make("input gradient", vec![m, n], vec![n, k], 1, 0)?,
        weight_gradient,
    ])
}

fn values(shape: &Shape, seed: u64) -> Result<HostTensor, Box<dyn Error>> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let values: Vec<f64> = (0..shape.count())
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let unit = (state >> 33) as f64 / (1u64 << 31) as f64 - 0.5;
            if shape.dtype.is_float() {
                unit
            } else {
                (unit * 200.0).round()
            }
        })
        .collect();
    Ok(HostTensor::from_f64(shape.clone(), &values)?)
}

fn element_type(dtype: DType) -> Result<ElementType, String> {
    match dtype {
        DType::F32 => Ok(ElementType::F32),
        DType::BF16 => Ok(ElementType::Bf16),
        DType::S8 => Ok(ElementType::S8),
        other => Err(format!("{other} inputs are not timed here")),
    }
}

fn time(client: &Client, case: &Case, rounds: usize) -> Result<(), Box<dyn Error>> {
    // Straight to the compiler: a `Program` would be rewritten by the very rules that are measured here.
    let options = CompileOptions::new(1, 1);
    let device = &client.addressable_devices()[0];
    let mut programs = Vec::new();
    for way in &case.ways {
        let text = stablehlo(&way.graph, "case", &EmitOptions::default());
        let executable = client.compile(&text, &options)?;
        let buffers = way
            .graph
            .inputs
            .iter()
            .zip(1..)
            .map(|(input, seed)| {
                let tensor = values(&input.shape, seed)?;
                let dims: Vec<i64> = input.shape.dims.iter().map(|d| *d as i64).collect();
                let kind = element_type(input.shape.dtype)?;
                Ok(Buffer::from_host(
                    client,
                    &tensor.data,
                    kind,
                    &dims,
                    device,
                )?)
            })
            .collect::<Result<Vec<Buffer>, Box<dyn Error>>>()?;
        programs.push((way.label, executable, buffers, Vec::new()));
    }
    for round in 0..rounds + 2 {
        for (_, executable, buffers, seconds) in &mut programs {
            let start = Instant::now();
            let arguments = buffers.iter().map(Arg::Borrow).collect();
            let results = executable.execute(vec![arguments])?.wait()?;
            let elapsed = start.elapsed().as_secs_f64();
            drop(results);
            if round >= 2 {
                seconds.push(elapsed);
            }
        }
    }
    println!("{}", case.name);
    let mut first = None;
    for (label, _, _, seconds) in &mut programs {
        seconds.sort_by(f64::total_cmp);
        let least = seconds[0];
        let base = *first.get_or_insert(least);
        println!(
            "  {label:24} {:8.3} {:8.3} ms  {:7.1} GFLOP/s  {:5.2}x",
            least * 1e3,
            seconds[seconds.len() / 2] * 1e3,
            case.flops / least / 1e9,
            base / least
        );
    }
    Ok(())
}

fn cases() -> Result<Vec<Case>, GraphError> {
    let sizes = [
        (32, 32, 32, 32),
        (32, 32, 96, 32),
        (32, 16, 64, 64),
        (32, 16, 192, 64),
        (32, 8, 128, 128),
        (32, 8, 256, 128),
    ]
    .map(|(batch, side, input, output)| Size {
        batch,
        side,
        input,
        output,
    });
    let mut cases = Vec::new();
    for s in sizes {
        cases.push(kernel_gradient(s, DType::F32)?);
        cases.push(kernel_gradient(s, DType::BF16)?);
        cases.push(input_gradient(s, DType::F32)?);
        cases.push(forward(s, DType::F32, DType::F32)?);
        cases.push(forward(s, DType::BF16, DType::F32)?);
        cases.push(forward(s, DType::S8, DType::S32)?);
    }
    for (m, k, n) in [
        (8192, 64, 64),
        (8192, 64, 512),
        (8192, 256, 64),
        (2048, 128, 128),
        (2048, 128, 1024),
        (2048, 512, 128),
    ] {
        cases.extend(linear(m, k, n)?);
    }
    Ok(cases)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut rounds = 15;
    let mut parts = Vec::new();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--bench" => {}
            "--rounds" => rounds = args.next().ok_or("--rounds needs a number")?.parse()?,
            _ => parts.push(arg),
        }
    }
    let plugin = Plugin::load(&locate(PluginKind::Cpu)?.library)?;
    let options = [("cpu_device_count".to_string(), NamedValue::Int64(1))];
    let client = Client::create(&plugin, &options)?;
    for case in cases()? {
        if parts.is_empty() || parts.iter().any(|p| case.name.contains(p.as_str())) {
            time(&client, &case, rounds)?;
        }
    }
    Ok(())
}
