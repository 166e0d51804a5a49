//! The CPU plugin's custom calls as any program may make them: what does not fit is refused by name, empty arrays are
//! no fault, and what runs out is an error.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::{cpu_client, cpu_plugin, in_child, kernels_run, passed};
use maxdiff::dtype::DType;
use maxdiff::host_tensor::HostTensor;
use maxdiff::pjrt::{
    Arg, Buffer, Client, CompileOptions, ElementType, LoadedExecutable, NamedValue,
};
use maxdiff::shape::Shape;

/// An array's type and dimensions.
#[derive(Clone, Debug)]
struct Type(DType, Vec<usize>);

impl Type {
    fn text(&self) -> String {
        let dims: String = self.1.iter().map(|n| format!("{n}x")).collect();
        format!("tensor<{dims}{}>", self.0.stablehlo())
    }

    fn layout(&self) -> String {
        let order: Vec<String> = (0..self.1.len()).rev().map(|d| d.to_string()).collect();
        match self.1.len() {
            0 => "dense<> : tensor<0xindex>".to_string(),
            rank => format!("dense<[{}]> : tensor<{rank}xindex>", order.join(", ")),
        }
    }
}

#[derive(Clone, Debug)]
struct Call {
    kernel: &'static str,
    operands: Vec<Type>,
    /// Of a call in place, that of its first operand.
    result: Type,
    attributes: Vec<(&'static str, &'static str)>,
}

impl Call {
    fn program(&self) -> String {
        let join = |parts: Vec<String>| parts.join(", ");
        let numbered = |text: fn(&Type) -> String| {
            let texts = self.operands.iter().enumerate();
            texts.map(move |(i, ty)| (i, text(ty)))
        };
        let parameters = join(
            numbered(Type::text)
                .map(|(i, t)| format!("%{i}: {t}"))
                .collect(),
        );
        let values = join(numbered(Type::text).map(|(i, _)| format!("%{i}")).collect());
        let types = join(numbered(Type::text).map(|(_, t)| t).collect());
        let layouts = join(numbered(Type::layout).map(|(_, t)| t).collect());
        let attributes = self
            .attributes
            .iter()
            .map(|(name, value)| format!("{name} = {value}"));
        let attributes = join(attributes.collect());
        let results = match self.in_place() {
            0 | 1 => vec![self.result.clone()],
            results => self.operands[..results.min(self.operands.len())].to_vec(),
        };
        let result = self.result.text();
        let of_results = |text: fn(&Type) -> String| join(results.iter().map(text).collect());
        let (all, result_layouts) = (of_results(Type::text), of_results(Type::layout));
        let (all, first) = match results.len() {
            1 => (all, "%r".to_string()),
            _ => (format!("({all})"), "%r#0".to_string()),
        };
        let (kernel, count) = (self.kernel, results.len());
        format!(
            "func.func @main({parameters}) -> {result} {{
               %r:{count} = stablehlo.custom_call @maxdiff.{kernel}({values}) {{api_version = 4 : i32,
                 backend_config = {{{attributes}}}, operand_layouts = [{layouts}], result_layouts = [{result_layouts}]}}
                 : ({types}) -> {all}
               return {first} : {result}
             }}"
        )
    }

    /// How many results the call has, which are of its first operands' types; 0 where it has one of its own.
    fn in_place(&self) -> usize {
        match self.kernel {
            "adamw_8bit" => 5,
            _ => 0,
        }
    }

    /// The call as a program, and operands of zeros.
    fn prepare(&self) -> (LoadedExecutable, Vec<Buffer>) {
        let client = cpu_client(1);
        let program = client
            .compile(&self.program(), &CompileOptions::new(1, 1))
            .unwrap_or_else(|error| panic!("{error}\n{}", self.program()));
        let device = &client.devices()[0];
        let buffers: Vec<Buffer> = self
            .operands
            .iter()
            .map(|Type(dtype, dims)| {
                let ty = match dtype {
                    DType::Pred => ElementType::Pred,
                    DType::BF16 => ElementType::Bf16,
                    DType::F32 => ElementType::F32,
                    DType::S8 => ElementType::S8,
                    DType::U8 => ElementType::U8,
                    DType::S32 => ElementType::S32,
                    DType::U32 => ElementType::U32,
                    other => panic!("{other}"),
                };
                let zeros = HostTensor::zeros(Shape::new(*dtype, dims.clone()));
                let dims: Vec<i64> = dims.iter().map(|n| *n as i64).collect();
                Buffer::from_host(&client, &zeros.data, ty, &dims, device).unwrap()
            })
            .collect();
        (program, buffers)
    }

    /// Makes the call with operands of zeros.
    fn make(&self) -> Result<(), String> {
        run(&self.prepare())
    }

    fn with_operand(&self, i: usize, operand: Type) -> Call {
        let mut call = self.clone();
        if i == 0 && self.in_place() > 0 {
            call.result = operand.clone();
        }
        call.operands[i] = operand;
        call
    }

    fn with_attribute(&self, name: &str, value: &'static str) -> Call {
        let mut call = self.clone();
        let place = call.attributes.iter_mut().find(|(n, _)| *n == name);
        place.unwrap_or_else(|| panic!("{self:?} has no {name}")).1 = value;
        call
    }

    #[track_caller]
    fn is_refused(&self, expected: &str) {
        let error = self.make().expect_err(&format!("{self:?} was computed"));
        let kernel = format!("maxdiff.{}: ", self.kernel);
        assert!(
            error.contains(&kernel) && error.contains(expected),
            "{error}\n{self:?}, expected {expected}"
        );
    }
}

fn run((program, operands): &(LoadedExecutable, Vec<Buffer>)) -> Result<(), String> {
    let arguments = vec![operands.iter().map(Arg::Borrow).collect()];
    let execution = program.execute(arguments).map_err(|e| e.to_string())?;
    execution.wait().map(|_| ()).map_err(|e| e.to_string())
}

fn bf16(dims: &[usize]) -> Type {
    Type(DType::BF16, dims.to_vec())
}

fn f32(dims: &[usize]) -> Type {
    Type(DType::F32, dims.to_vec())
}

/// A call of each kernel, and its operands' names.
fn calls() -> Vec<(Call, &'static [&'static str])> {
    const OFF: &str = "0 : i64";
    const ON: &str = "1 : i64";
    const ONE: &str = "1.0 : f32";
    const LARGEST: &str = "4294967295 : i64";
    let call =
        |kernel, operands: &[Type], result, attributes: &[(&'static str, &'static str)]| Call {
            kernel,
            operands: operands.to_vec(),
            result,
            attributes: attributes.to_vec(),
        };
    let image = [("row_scale", OFF), ("column_scale", ON), ("bias", ON)];
    let window = [
        ("kernel_height", "3 : i64"),
        ("kernel_width", "3 : i64"),
        ("stride_y", "2 : i64"),
        ("stride_x", "2 : i64"),
        ("low_y", OFF),
        ("low_x", OFF),
        ("high_y", ON),
        ("high_x", ON),
    ];
    vec![
        (
            call(
                "contract",
                &[
                    Type(DType::U8, vec![2, 3, 8]),
                    Type(DType::S8, vec![2, 2, 16, 4]),
                    Type(DType::S32, vec![32]),
                    f32(&[2, 3]),
                    bf16(&[20]),
                    f32(&[20]),
                ],
                bf16(&[2, 3, 20]),
                &[("row_scale", ON), ("column_scale", ON), ("bias", ON)],
            ),
            &[
                "lhs",
                "packed rhs",
                "start",
                "row_scale",
                "column_scale",
                "bias",
            ],
        ),
        (
            call(
                "contract",
                &[
                    bf16(&[2, 6, 8, 4]),
                    bf16(&[2, 18, 16, 2]),
                    f32(&[20]),
                    f32(&[20]),
                ],
                f32(&[2, 3, 4, 20]),
                &[&image[..], &window[..]].concat(),
            ),
            &["lhs", "packed rhs", "column_scale", "bias"],
        ),
        (
            call(
                "attention",
                &[
                    bf16(&[2, 5, 3, 8]),
                    bf16(&[2, 7, 3, 8]),
                    bf16(&[2, 7, 3, 8]),
                ],
                bf16(&[2, 5, 3, 8]),
                &[("scale", ONE), ("causal", ON)],
            ),
            &["query", "key", "value"],
        ),
        (
            call(
                "abs_max",
                &[bf16(&[2, 3, 8])],
                bf16(&[2, 3]),
                &[("scale", ON)],
            ),
            &["x"],
        ),
        (
            call(
                "quantize",
                &[bf16(&[2, 3, 8]), bf16(&[2, 3])],
                Type(DType::U8, vec![2, 3, 8]),
                &[],
            ),
            &["x", "scale"],
        ),
        (
            call(
                "layer_norm",
                &[bf16(&[2, 3, 8]), f32(&[8]), f32(&[8])],
                bf16(&[2, 3, 8]),
                &[("epsilon", ONE)],
            ),
            &["x", "weight", "bias"],
        ),
        (
            call(
                "group_norm",
                &[bf16(&[2, 3, 4, 8]), f32(&[8]), f32(&[8])],
                bf16(&[2, 3, 4, 8]),
                &[("groups", "4 : i64"), ("epsilon", ONE), ("silu", ON)],
            ),
            &["x", "weight", "bias"],
        ),
        (
            call("geglu", &[bf16(&[2, 3, 16])], bf16(&[2, 3, 8]), &[]),
            &["x"],
        ),
        (
            call(
                "quantized_product",
                &[
                    f32(&[5, 6]),
                    f32(&[5, 20]),
                    Type(DType::U32, vec![2]),
                    f32(&[20]),
                ],
                f32(&[6, 20]),
                &[
                    ("lhs_transposed", ON),
                    ("rhs_transposed", ON),
                    ("stochastic", ON),
                    ("bias", ON),
                    ("in_bf16", ON),
                ],
            ),
            &["lhs", "rhs", "key", "bias"],
        ),
        (
            call(
                "quantized_product",
                &[f32(&[2, 6, 8, 5]), f32(&[20, 3, 3, 5])],
                f32(&[2, 3, 4, 20]),
                &[
                    &window[..],
                    &[("stochastic", OFF), ("bias", OFF), ("in_bf16", OFF)],
                ]
                .concat(),
            ),
            &["lhs", "rhs"],
        ),
        (
            call(
                "product",
                &[bf16(&[5, 6]), bf16(&[5, 20]), f32(&[20])],
                bf16(&[6, 20]),
                &[
                    ("lhs_transposed", ON),
                    ("rhs_transposed", ON),
                    ("scale", OFF),
                    ("bias", ON),
                ],
            ),
            &["lhs", "rhs", "bias"],
        ),
        (
            call(
                "product",
                &[
                    bf16(&[2, 6, 8, 4]),
                    Type(DType::S8, vec![4, 20, 3, 3]),
                    f32(&[20]),
                ],
                f32(&[2, 3, 4, 20]),
                &[
                    &window[..],
                    &[("image_gradient", ON), ("scale", ON), ("bias", OFF)],
                ]
                .concat(),
            ),
            &["lhs", "rhs", "scale"],
        ),
        (
            call(
                "kernel_gradient",
                &[bf16(&[2, 3, 4, 20]), bf16(&[2, 6, 8, 5])],
                f32(&[20, 5, 3, 3]),
                &window,
            ),
            &["gradient", "image"],
        ),
        (
            call(
                "adamw_8bit",
                &[
                    bf16(&[9, 60]),
                    Type(DType::U8, vec![9, 60]),
                    f32(&[3]),
                    Type(DType::U8, vec![9, 60]),
                    f32(&[3]),
                    f32(&[9, 60]),
                    f32(&[5]),
                    Type(DType::U32, vec![2]),
                ],
                bf16(&[9, 60]),
                &[
                    ("keep_first", "0.9 : f32"),
                    ("add_first", "0.1 : f32"),
                    ("keep_second", "0.999 : f32"),
                    ("add_second", "0.001 : f32"),
                    ("epsilon", "1.0e-8 : f32"),
                    ("weight_decay", "0.0 : f32"),
                    ("salt", LARGEST),
                ],
            ),
            &[
                "weight", "codes", "largest", "codes", "largest", "gradient", "scalars", "key",
            ],
        ),
        (
            call(
                "contract",
                &[
                    bf16(&[2, 3, 8]),
                    Type(DType::U8, vec![2, 4, 16]),
                    bf16(&[2, 2, 16]),
                    f32(&[2, 2, 16]),
                    f32(&[20]),
                ],
                bf16(&[2, 3, 20]),
                &[
                    ("row_scale", OFF),
                    ("column_scale", OFF),
                    ("bias", ON),
                    ("stored_bits", "4 : i64"),
                    ("scale_groups", "2 : i64"),
                    ("zero_point", ON),
                ],
            ),
            &["lhs", "packed rhs", "group_scale", "zero_point", "bias"],
        ),
        (
            call(
                "contract",
                &[
                    bf16(&[2, 3, 8]),
                    Type(DType::S8, vec![2, 4, 16, 2]),
                    f32(&[20]),
                    f32(&[20]),
                ],
                bf16(&[2, 3, 20]),
                &[
                    ("row_scale", OFF),
                    ("column_scale", ON),
                    ("bias", ON),
                    ("stored_bits", "8 : i64"),
                    ("scale_groups", OFF),
                ],
            ),
            &["lhs", "packed rhs", "column_scale", "bias"],
        ),
    ]
}

#[test]
fn a_mask_that_does_not_fit_is_refused_by_name() {
    if !kernels_run() {
        return;
    }
    let (attention, _) = calls()
        .into_iter()
        .find(|(call, _)| call.kernel == "attention")
        .unwrap();
    let mut masked = attention.with_attribute("causal", "0 : i64");
    masked.operands.push(Type(DType::Pred, vec![2, 7]));
    masked.make().unwrap();
    for wrong in [f32(&[2, 7]), Type(DType::Pred, vec![2, 5])] {
        masked
            .with_operand(3, wrong)
            .is_refused("operand 3 (mask): expected PRED[2,7], found ");
    }
}

#[test]
fn operands_that_do_not_fit_are_refused_by_name() {
    if !kernels_run() {
        return;
    }
    for (call, names) in calls() {
        call.make().unwrap();
        assert_eq!(names.len(), call.operands.len());
        for (i, name) in names.iter().enumerate() {
            let Type(dtype, dims) = &call.operands[i];
            // Two bytes where there were four, or the other way round.
            let other = match dtype {
                DType::S32 => DType::BF16,
                _ => DType::S32,
            };
            let found = call.with_operand(i, Type(other, dims.clone()));
            found.is_refused(&format!("operand {i} ({name}): expected "));
            // One rank more, and one row less: never out of bounds, always something that does not fit.
            let more = [&[1], &dims[..]].concat();
            call.with_operand(i, Type(*dtype, more))
                .is_refused("expected ");
            let mut less = dims.clone();
            less[0] -= 1;
            call.with_operand(i, Type(*dtype, less))
                .is_refused("expected ");
        }
        let mut missing = call.clone();
        missing.operands.pop();
        missing.is_refused(&format!(
            "operand {} ({}) is missing",
            names.len() - 1,
            names[names.len() - 1]
        ));
        let mut extra = call.clone();
        extra.operands.push(f32(&[1]));
        extra.is_refused(&format!(
            "takes {} operands, found {}",
            names.len(),
            names.len() + 1
        ));
        if call.in_place() == 0 {
            let mut result = call.clone();
            result.result.1.push(2);
            result.is_refused("the result: expected ");
        }
        for i in 0..call.attributes.len() {
            let mut without = call.clone();
            let (name, _) = without.attributes.remove(i);
            // Without its first attribute a window is none, and the operands are those of no matrix; nor are stored
            // weights any without theirs.
            // And an update that does not round takes no key.
            let expected = match name {
                "kernel_height" | "stored_bits" => "expected ",
                "salt" if call.in_place() > 0 => "takes 7 operands, found 8",
                _ => &format!("attribute {name}"),
            };
            without.is_refused(expected);
        }
    }
}

#[test]
fn shapes_that_contradict_attributes_are_refused() {
    if !kernels_run() {
        return;
    }
    let call = |place: usize| calls().swap_remove(place).0;
    let [matrix, image, attention] = [0, 1, 2].map(call);
    matrix
        .with_attribute("bias", "2 : i64")
        .is_refused("attribute bias is 2, expected 0 to 1");
    matrix
        .with_operand(0, Type(DType::U8, vec![2, 3, 6]))
        .is_refused("the last a multiple of 4, found U8[2,3,6]");
    image
        .with_attribute("stride_x", "0 : i64")
        .is_refused("attribute stride_x is 0, expected 1 to ");
    image
        .with_attribute("low_y", "-1 : i64")
        .is_refused("attribute low_y is -1");
    image
        .with_attribute("high_x", "3 : i64")
        .is_refused("the result: expected BF16|F32[2,3,5,*], found F32[2,3,4,20]");
    image
        .with_attribute("kernel_width", "12 : i64")
        .is_refused("a window of 3x12 is larger than the padded image of 7x9");
    let stored = calls().into_iter().rev().nth(1).unwrap().0;
    stored
        .with_attribute("scale_groups", "3 : i64")
        .is_refused("attribute scale_groups is 3, which does not divide 4 pairs of channels");
    stored
        .with_attribute("stored_bits", "6 : i64")
        .is_refused("attribute stored_bits is 6, expected 4 or 8");
    let mut odd = attention;
    odd.operands = vec![bf16(&[2, 5, 3, 7]); 3];
    odd.result = bf16(&[2, 5, 3, 7]);
    odd.is_refused("operand 0 (query): expected an even last dimension, found BF16[2,5,3,7]");
    let group_norm = call(6);
    let product = call(9);
    product
        .with_operand(1, f32(&[20, 3, 3, 4]))
        .is_refused("operand 1 (rhs): expected F32[*,3,3,5], found F32[20,3,3,4]");
    let mut long = call(8);
    long.operands[..2].clone_from_slice(&[f32(&[65_001, 6]), f32(&[65_001, 20])]);
    long.is_refused("expected 1 to 65000 terms of each sum, found 65001");
    let mut odd = call(11);
    odd.operands[..2].clone_from_slice(&[bf16(&[2, 6, 8, 5]), bf16(&[5, 20, 3, 3])]);
    odd.is_refused("expected an even number of channels, found 5");
    call(12)
        .with_operand(0, bf16(&[2, 3, 5, 20]))
        .is_refused("operand 0 (gradient): expected 3x4 places, found BF16[2,3,5,20]");
    group_norm
        .with_attribute("groups", "3 : i64")
        .is_refused("divide into 3 groups, found BF16[2,3,4,8]");
    group_norm
        .with_attribute("groups", "0 : i64")
        .is_refused("attribute groups is 0, expected 1 to ");
}

#[test]
fn empty_arrays_are_no_fault() {
    if !kernels_run() {
        return;
    }
    let call = |place: usize, operands: &[Type], result: Type| {
        let mut call = calls().swap_remove(place).0;
        call.operands = operands.to_vec();
        call.result = result;
        call.make()
            .unwrap_or_else(|error| panic!("{error}\n{call:?}"));
    };
    let s32 = |n: usize| Type(DType::S32, vec![n]);
    let packed = |blocks| Type(DType::S8, vec![blocks, 2, 16, 4]);
    let rows = Type(DType::U8, vec![0, 3, 8]);
    let columns = [f32(&[0, 3]), f32(&[20]), f32(&[20])];
    call(
        0,
        &[&[rows, packed(2), s32(32)], &columns[..]].concat(),
        bf16(&[0, 3, 20]),
    );
    let rows = Type(DType::U8, vec![2, 3, 8]);
    let columns = [f32(&[2, 3]), f32(&[0]), f32(&[0])];
    call(
        0,
        &[&[rows, packed(0), s32(0)], &columns[..]].concat(),
        bf16(&[2, 3, 0]),
    );
    for (batch, queries, keys, heads, size) in [
        (0, 5, 7, 3, 8),
        (2, 0, 7, 3, 8),
        (2, 5, 0, 3, 8),
        (2, 5, 7, 0, 8),
        (2, 5, 7, 3, 0),
    ] {
        let q = bf16(&[batch, queries, heads, size]);
        let k = bf16(&[batch, keys, heads, size]);
        call(2, &[q.clone(), k.clone(), k], q);
    }
    for dims in [[0, 3, 8], [2, 0, 8], [2, 3, 0]] {
        let x = bf16(&dims);
        call(3, std::slice::from_ref(&x), bf16(&dims[..2]));
        call(
            4,
            &[x.clone(), bf16(&dims[..2])],
            Type(DType::U8, dims.to_vec()),
        );
        call(5, &[x.clone(), f32(&dims[2..]), f32(&dims[2..])], x.clone());
        call(7, &[bf16(&[dims[0], dims[1], 2 * dims[2]])], x);
    }
    for dims in [[0, 3, 4, 8], [2, 0, 4, 8], [2, 3, 4, 0]] {
        let x = bf16(&dims);
        call(6, &[x.clone(), f32(&dims[3..]), f32(&dims[3..])], x);
    }
}

#[test]
fn a_kernel_that_runs_out_of_memory_is_an_error_and_the_process_goes_on() {
    if !kernels_run() {
        return;
    }
    let name = "kernel_calls::a_kernel_that_runs_out_of_memory_is_an_error_and_the_process_goes_on";
    if let Some(output) = in_child(name, &[]) {
        return passed(&output);
    }
    let attention = |keys: usize| {
        let mut call = calls().swap_remove(2).0;
        let (q, k) = (bf16(&[1, 100, 1, 8]), bf16(&[1, keys, 1, 8]));
        call.operands = vec![q.clone(), k.clone(), k];
        call.result = q;
        call.prepare()
    };
    run(&attention(7)).unwrap();
    // Packed, keys and values are 192 MB.
    let large = attention(4 << 20);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size = status
        .lines()
        .find_map(|line| line.strip_prefix("VmSize:"))
        .unwrap();
    let size: u64 = size.trim().trim_end_matches(" kB").parse().unwrap();
    limit_memory(&format!("{}", (size + (16 << 10)) << 10));
    let error = run(&large).unwrap_err();
    limit_memory("unlimited");
    assert!(
        error.contains("maxdiff.attention: out of host memory"),
        "{error}"
    );
    run(&large).unwrap();
}

/// Sets the bytes of address space that this process may have.
fn limit_memory(bytes: &str) {
    let process = std::process::id().to_string();
    let limit = format!("--as={bytes}:");
    let status = Command::new("prlimit")
        .args(["--pid", &process, &limit])
        .status();
    assert!(status.unwrap().success());
}

/// Names of this process's threads.
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |path: &Path| std::fs::read_to_string(path.join("comm")).unwrap_or_default();
    tasks
        .map(|task| name(&task.unwrap().path()).trim().to_string())
        .collect()
}

#[test]
fn kernels_and_the_compiler_compute_with_as_many_threads_as_asked() {
    let name = "kernel_calls::kernels_and_the_compiler_compute_with_as_many_threads_as_asked";
    if let Some(output) = in_child(name, &[("MAXDIFF_CPU_THREADS", "3")]) {
        return passed(&output);
    }
    let client = cpu_client(1);
    // The thread that calls computes too.
    let expected = [
        ("maxdiff-kernels", if kernels_run() { 2 } else { 0 }),
        ("tf_XLAEigen", 3),
    ];
    // A thread has its name soon after it was started.
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let names = threads();
        let count = |prefix: &str| names.iter().filter(|name| name.starts_with(prefix)).count();
        if expected.iter().all(|(prefix, n)| count(prefix) == *n) {
            break;
        }
        assert!(Instant::now() < deadline, "{names:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(client);
    // What is decided for the process stays.
    let options = [("cpu_threads".to_string(), NamedValue::Int64(2))];
    let error = Client::create(&cpu_plugin(), &options).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("cpu_threads is 2, but this process already computes with 3"),
        "{error}"
    );
}
