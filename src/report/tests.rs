//! Programs built by hand in the forms libtpu 0.0.51 writes, and one that the CPU plugin compiled.

use super::*;
use crate::dtype::DType;
use crate::graph::{Builder, DotDims, Init, Tensor, grad};
use crate::pjrt::install::{self, PluginKind};
use crate::pjrt::{NamedValue, Plugin};
use crate::proto::xla::{
    CollectiveDeviceListProto, DeviceAssignmentProto, DotDimensionNumbers, FrontendAttributes,
    HloComputationProto, HloInstructionProto, LiteralProto, OpMetadata, PrimitiveType,
    ReplicaGroup, ShapeProto, SourceTarget, hlo_instruction_proto::ReplicaGroupList,
};

use crate::quant::{Policy, ROUNDING_KEY, annotate, lower};
use crate::runtime::{Program, ProgramOptions, Session};
use crate::shape::Shape;
use crate::shard::{LogicalAxisRules, Parallelism};
use crate::train::optimizer::{OptimizerOptions, Trained, adamw};

use PrimitiveType::{Bf16, F32, Pred, S8, S32, Token, Tuple};

fn array(element: PrimitiveType, dims: &[i64]) -> ShapeProto {
    ShapeProto {
        element_type: element as i32,
        dimensions: dims.to_vec(),
        ..Default::default()
    }
}

fn tuple(parts: Vec<ShapeProto>) -> ShapeProto {
    ShapeProto {
        element_type: Tuple as i32,
        tuple_shapes: parts,
        ..Default::default()
    }
}

fn op(opcode: &str, shape: ShapeProto, operands: &[i64]) -> HloInstructionProto {
    HloInstructionProto {
        opcode: opcode.to_owned(),
        shape: Some(shape),
        operand_ids: operands.to_vec(),
        ..Default::default()
    }
}

fn named(op_name: &str, mut instruction: HloInstructionProto) -> HloInstructionProto {
    instruction.metadata = Some(OpMetadata {
        op_name: op_name.to_owned(),
        ..Default::default()
    });
    instruction
}

fn calling(computations: &[i64], mut instruction: HloInstructionProto) -> HloInstructionProto {
    instruction.called_computation_ids = computations.to_vec();
    instruction
}

fn attributes(pairs: &[(&str, &str)], mut instruction: HloInstructionProto) -> HloInstructionProto {
    instruction.frontend_attributes = Some(FrontendAttributes {
        map: pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect(),
    });
    instruction
}

fn grouped(groups: &[&[i64]], mut instruction: HloInstructionProto) -> HloInstructionProto {
    instruction.use_global_device_ids = true;
    instruction.channel_id = 1;
    instruction.replica_group_list = Some(ReplicaGroupList::CollectiveDeviceList(
        CollectiveDeviceListProto {
            replica_groups: groups
                .iter()
                .map(|g| ReplicaGroup {
                    replica_ids: g.to_vec(),
                })
                .collect(),
            iota_replica_group_list: None,
        },
    ));
    instruction
}

fn cycles(count: &str, mut instruction: HloInstructionProto) -> HloInstructionProto {
    instruction.backend_config =
        format!(r#"{{"flag_configs":[],"window_config":{{"estimated_cycles":"{count}"}}}}"#)
            .into_bytes();
    instruction
}

fn parameter(number: i64, shape: ShapeProto) -> HloInstructionProto {
    HloInstructionProto {
        parameter_number: number,
        ..op("parameter", shape, &[])
    }
}

fn element(index: i64, shape: ShapeProto, operand: i64) -> HloInstructionProto {
    HloInstructionProto {
        tuple_index: index,
        ..op("get-tuple-element", shape, &[operand])
    }
}

fn constant(value: i32) -> HloInstructionProto {
    HloInstructionProto {
        literal: Some(LiteralProto {
            shape: Some(array(S32, &[])),
            s32s: vec![value],
            ..Default::default()
        }),
        ..op("constant", array(S32, &[]), &[])
    }
}

fn dot(lhs: i64, rhs: i64, shape: ShapeProto) -> HloInstructionProto {
    HloInstructionProto {
        dot_dimension_numbers: Some(DotDimensionNumbers {
            lhs_contracting_dimensions: vec![1],
            rhs_contracting_dimensions: vec![0],
            ..Default::default()
        }),
        ..op("dot", shape, &[lhs, rhs])
    }
}

#[derive(Default)]
struct Module {
    proto: HloModuleProto,
    next_id: i64,
}

impl Module {
    /// One program for a slice of `devices`.
    fn new(devices: i32) -> Self {
        let mut module = Self::default();
        module.proto.name = "jit_step".to_owned();
        module.proto.device_assignment = Some(DeviceAssignmentProto {
            replica_count: 1,
            computation_count: devices,
            computation_devices: Vec::new(),
        });
        module
    }

    fn add(&mut self, body: &mut Vec<HloInstructionProto>, mut i: HloInstructionProto) -> i64 {
        self.next_id += 1;
        i.id = self.next_id;
        i.name = format!("{}.{}", i.opcode, self.next_id);
        body.push(i);
        self.next_id
    }

    /// A computation; the last instruction is its root.
    fn computation(&mut self, name: &str, instructions: Vec<HloInstructionProto>) -> i64 {
        self.next_id += 1;
        self.proto.computations.push(HloComputationProto {
            name: name.to_owned(),
            id: self.next_id,
            root_id: instructions.last().unwrap().id,
            instructions,
            ..Default::default()
        });
        self.next_id
    }

    /// A reduction of two scalars.
    fn reducer(&mut self, opcode: &str) -> i64 {
        let mut body = Vec::new();
        let a = self.add(&mut body, parameter(0, array(F32, &[])));
        let b = self.add(&mut body, parameter(1, array(F32, &[])));
        self.add(&mut body, op(opcode, array(F32, &[]), &[a, b]));
        self.computation(opcode, body)
    }

    fn entry(mut self, instructions: Vec<HloInstructionProto>) -> HloModuleProto {
        self.proto.entry_computation_id = self.computation("main", instructions);
        self.proto
    }

    /// A send and receive between slices, with what is received.
    fn across_slices(
        &mut self,
        body: &mut Vec<HloInstructionProto>,
        operand: i64,
        shape: &ShapeProto,
        reduce: &str,
    ) -> i64 {
        let rendezvous = format!("all-reduce.{}_0", self.next_id);
        let pairs = [
            ("_xla_host_transfer_handler_name", "xla_megascale_runtime"),
            ("_xla_host_transfer_rendezvous", rendezvous.as_str()),
            ("_xla_megascale_transfer_type", "ALL_REDUCE"),
            ("_xla_megascale_reduce_operation", reduce),
            ("_xla_megascale_target", "{1,2}x{0:3}"),
        ];
        let token = array(Token, &[]);
        let transfer = |opcode: &str, shape: ShapeProto, operands: &[i64]| HloInstructionProto {
            is_host_transfer: true,
            ..attributes(&pairs, op(opcode, shape, operands))
        };
        let after_all = self.add(body, op("after-all", token.clone(), &[]));
        let in_flight = tuple(vec![shape.clone(), array(S32, &[]), token.clone()]);
        let send = self.add(
            body,
            transfer("send", in_flight.clone(), &[operand, after_all]),
        );
        let recv = self.add(body, transfer("recv", in_flight, &[after_all]));
        self.add(body, transfer("send-done", token.clone(), &[send]));
        let received = tuple(vec![shape.clone(), token]);
        let done = self.add(body, transfer("recv-done", received, &[recv]));
        self.add(body, element(0, shape.clone(), done))
    }
}

/// Two slices of four devices.
const SLICES: [i64; 8] = [0, 0, 0, 0, 1, 1, 1, 1];
const ALL: &[&[i64]] = &[&[0, 1, 2, 3]];

fn report_with(
    module: &HloModuleProto,
    weight_arguments: &[usize],
    hints: &[TripCountHint],
) -> CompileReport {
    CompileReport::new(
        module,
        &ReportInput {
            parameters: 7,
            memory: Memory {
                argument: 4 << 30,
                peak: Some(6 << 30),
                hbm_limit: Some(16 << 30),
                ..Default::default()
            },
            slice_of_partition: &SLICES,
            weight_arguments,
            clock_hz: Some(1.5e9),
            trip_count_hints: hints,
            compile_seconds: 2.5,
        },
    )
    .unwrap()
}

fn report(module: &HloModuleProto) -> CompileReport {
    report_with(module, &[], &[])
}

/// A step in data parallelism: a weight gathered, an int8 dot, its weight derivative reduced in
/// the slice and across slices, an absmax across both, and the update.
fn training_step() -> HloModuleProto {
    let mut m = Module::new(4);
    let sum = m.reducer("add");
    let max = m.reducer("maximum");
    let mut body = Vec::new();
    let b = &mut body;
    let weight = m.add(b, parameter(0, array(F32, &[16, 64])));
    let x = m.add(b, parameter(1, array(S8, &[8, 64])));
    let cast = m.add(b, op("convert", array(S8, &[16, 64]), &[weight]));
    let gathered = m.add(
        b,
        grouped(ALL, op("all-gather", array(S8, &[64, 64]), &[cast])),
    );
    let y = m.add(
        b,
        cycles(
            "1000",
            named("unet/to_q/dot", dot(x, gathered, array(S32, &[8, 64]))),
        ),
    );
    let partial = m.add(
        b,
        grouped(
            ALL,
            calling(&[sum], op("all-reduce", array(S32, &[8, 64]), &[y])),
        ),
    );
    let absmax = m.add(
        b,
        named(
            "backward/unet/to_q/gradient/range_finding",
            op("reduce", array(F32, &[64]), &[partial]),
        ),
    );
    let absmax = m.add(
        b,
        grouped(
            ALL,
            calling(&[max], op("all-reduce", array(F32, &[64]), &[absmax])),
        ),
    );
    let absmax = m.across_slices(b, absmax, &array(F32, &[64]), "MAX");
    let xt = m.add(b, op("transpose", array(S8, &[64, 8]), &[x]));
    let drhs = m.add(
        b,
        cycles(
            "500",
            named(
                "backward/unet/to_q/gradient/dot_general",
                dot(xt, partial, array(S32, &[64, 64])),
            ),
        ),
    );
    let scaled = m.add(b, op("multiply", array(F32, &[64, 64]), &[drhs, absmax]));
    let scattered = m.add(
        b,
        grouped(
            ALL,
            calling(
                &[sum],
                op("reduce-scatter", array(F32, &[16, 64]), &[scaled]),
            ),
        ),
    );
    let gradient = m.across_slices(b, scattered, &array(F32, &[16, 64]), "SUM");
    m.add(
        b,
        named(
            "optimizer/update",
            op("subtract", array(F32, &[16, 64]), &[weight, gradient]),
        ),
    );
    m.entry(body)
}

#[test]
fn traffic_by_link_and_purpose() {
    let report = report_with(&training_step(), &[0], &[]);
    assert_eq!(
        report.ici_bytes,
        ByPurpose {
            range_finding: 64 * 4,
            gradient: 64 * 64 * 4,
            parameter: 16 * 64,
            activation: 8 * 64 * 4,
            other: 0,
        }
    );
    assert_eq!(
        report.dcn_bytes,
        ByPurpose {
            range_finding: 64 * 4,
            gradient: 16 * 64 * 4,
            ..Default::default()
        }
    );
    let dcn: Vec<_> = report
        .collectives
        .iter()
        .filter(|c| c.link == Link::Dcn)
        .map(|c| (c.kind.as_str(), c.count, c.op_name.as_str()))
        .collect();
    assert_eq!(
        dcn,
        [
            ("all-reduce", 1, "backward/unet/to_q/gradient/range_finding"),
            ("all-reduce", 1, "backward/unet/to_q/gradient/dot_general"),
        ]
    );
    // The same gather is of activations when its argument is no weight.
    let unknown = report_with(&training_step(), &[], &[]);
    assert_eq!(unknown.ici_bytes.parameter, 0);
}

#[test]
fn flops_and_predicted_time() {
    let report = report(&training_step());
    // The second dot mixes int8 and int32: the wider operand names it.
    assert_eq!(
        report.flops,
        [("int32", 2 * 64 * 64 * 8), ("int8", 2 * 8 * 64 * 64)]
            .map(|(k, v)| (k.to_owned(), v))
            .into()
    );
    assert_eq!(report.int8_flops_share, 0.5);
    let predicted = report.predicted_ms.unwrap();
    assert_eq!(predicted.total, 1500.0 / 1.5e9 * 1e3);
    assert_eq!(predicted.by_kind.keys().collect::<Vec<_>>(), ["dot"]);
    assert!(predicted.unpredicted.is_empty());
}

#[test]
fn a_gradient_is_known_by_where_it_goes() {
    // The derivative of a bias: a plain sum, named after the layer, that only the optimizer uses;
    // and a derivative of an activation, which a product uses.
    let mut m = Module::new(4);
    let sum = m.reducer("add");
    let mut body = Vec::new();
    let b = &mut body;
    let g = m.add(b, parameter(0, array(F32, &[64])));
    let h = m.add(b, parameter(1, array(F32, &[8, 8])));
    let bias = m.add(
        b,
        named(
            "backward/unet/norm1/gradient/reduce",
            op("negate", array(F32, &[64]), &[g]),
        ),
    );
    let dx = m.add(
        b,
        named(
            "backward/unet/to_q/dot_general",
            op("negate", array(F32, &[8, 8]), &[h]),
        ),
    );
    let combined_shape = tuple(vec![array(F32, &[64]), array(F32, &[8, 8])]);
    let both = m.add(
        b,
        grouped(
            ALL,
            calling(&[sum], op("all-reduce", combined_shape, &[bias, dx])),
        ),
    );
    let bias = m.add(b, element(0, array(F32, &[64]), both));
    let dx = m.add(b, element(1, array(F32, &[8, 8]), both));
    m.add(
        b,
        named("backward/unet/conv/dot", dot(dx, dx, array(F32, &[8, 8]))),
    );
    m.add(
        b,
        named("optimizer/update", op("add", array(F32, &[64]), &[bias, g])),
    );
    let report = report(&m.entry(body));
    // One combined collective, an entry for each purpose.
    assert_eq!(report.collectives.len(), 2);
    assert_eq!(report.ici_bytes.gradient, 64 * 4);
    assert_eq!(report.ici_bytes.activation, 8 * 8 * 4);
}

#[test]
fn scales_gathered_by_a_sum_are_range_finding() {
    // Instead of gathering, the TPU compiler may write each part into zeros and add them up. The
    // position of the part and the zeros have names, but are not what is moved.
    let mut m = Module::new(4);
    let sum = m.reducer("add");
    let mut fused = Vec::new();
    let f = &mut fused;
    let part = m.add(f, parameter(0, array(F32, &[4])));
    let at = m.add(f, parameter(1, array(S32, &[])));
    let at = m.add(
        f,
        named("unet/to_q/dot", op("negate", array(S32, &[]), &[at])),
    );
    let zero = m.add(f, op("constant", array(F32, &[]), &[]));
    let zeros = m.add(
        f,
        named("broadcast.27", op("broadcast", array(F32, &[16]), &[zero])),
    );
    let range = "unet/to_q/dot/range_finding";
    let scale = m.add(f, named(range, op("abs", array(F32, &[4]), &[part])));
    m.add(
        f,
        op(
            "dynamic-update-slice",
            array(F32, &[16]),
            &[zeros, scale, at],
        ),
    );
    let fused = m.computation("fused_computation", fused);
    let mut body = Vec::new();
    let b = &mut body;
    let x = m.add(b, parameter(0, array(F32, &[4])));
    let at = m.add(b, parameter(1, array(S32, &[])));
    let placed = m.add(
        b,
        calling(&[fused], op("fusion", array(F32, &[16]), &[x, at])),
    );
    let reduce = calling(&[sum], op("all-reduce", array(F32, &[16]), &[placed]));
    m.add(b, grouped(ALL, reduce));
    let report = report(&m.entry(body));
    assert_eq!(report.ici_bytes.range_finding, 64);
    assert_eq!(report.collectives[0].op_name, range);
}

/// A loop over a counter from `start` while below the bound, its body an all-gather of the carried
/// array.
fn looping(start: i32, bound: Option<i32>, op_name: &str) -> HloModuleProto {
    let mut m = Module::new(4);
    let (int, data) = (array(S32, &[]), array(Bf16, &[4, 4]));
    let carried = tuple(vec![int.clone(), data.clone(), int.clone()]);

    let mut body = Vec::new();
    let p = m.add(&mut body, parameter(0, carried.clone()));
    let i = m.add(&mut body, element(0, int.clone(), p));
    let copy = m.add(&mut body, op("copy", int.clone(), &[i]));
    let one = m.add(&mut body, constant(1));
    let next = m.add(&mut body, op("add", int.clone(), &[copy, one]));
    let x = m.add(&mut body, element(1, data.clone(), p));
    let gathered = m.add(
        &mut body,
        cycles(
            "10",
            grouped(ALL, op("all-gather", array(Bf16, &[16, 4]), &[x])),
        ),
    );
    let slice = m.add(&mut body, op("slice", data.clone(), &[gathered]));
    let limit = m.add(&mut body, element(2, int.clone(), p));
    m.add(
        &mut body,
        op("tuple", carried.clone(), &[next, slice, limit]),
    );
    let body = m.computation("body", body);

    let mut condition = Vec::new();
    let p = m.add(&mut condition, parameter(0, carried.clone()));
    let i = m.add(&mut condition, element(0, int.clone(), p));
    let limit = m.add(&mut condition, element(2, int.clone(), p));
    let compare = HloInstructionProto {
        comparison_direction: "LT".to_owned(),
        ..op("compare", array(Pred, &[]), &[i, limit])
    };
    m.add(&mut condition, compare);
    let condition = m.computation("condition", condition);

    let mut main = Vec::new();
    let b = &mut main;
    let start = m.add(b, constant(start));
    let x = m.add(b, named("latents", parameter(0, data)));
    let limit = match bound {
        Some(bound) => m.add(b, constant(bound)),
        None => m.add(b, parameter(1, int)),
    };
    let init = m.add(b, op("tuple", carried.clone(), &[start, x, limit]));
    let call = calling(&[body, condition], op("while", carried, &[init]));
    m.add(b, named(op_name, call));
    m.entry(main)
}

#[test]
fn loops_count_as_often_as_they_run() {
    // A loop of 4 with the first iteration peeled off, as the TPU compiler leaves it.
    let report = report(&looping(1, Some(4), ""));
    let gather = &report.collectives[0];
    assert_eq!((gather.count, gather.bytes), (3, 3 * 4 * 4 * 2));
    assert!(report.unknown_trip_counts.is_empty());
    assert_eq!(report.predicted_ms.unwrap().total, 30.0 / 1.5e9 * 1e3);
    assert_eq!(
        report_with(&looping(4, Some(4), ""), &[], &[]).collectives,
        [],
        "a loop that never runs moves nothing"
    );
}

#[test]
fn a_loop_nothing_tells_of_needs_a_hint_or_is_reported() {
    let module = looping(0, None, "unet/mid_block/while");
    let unknown = report(&module);
    assert_eq!(unknown.collectives[0].count, 1);
    assert_eq!(unknown.unknown_trip_counts.len(), 1);
    assert_eq!(
        unknown.unknown_trip_counts[0].op_name,
        "unet/mid_block/while"
    );
    assert!(
        unknown
            .to_string()
            .contains("counted once, iterations unknown: unet/mid_block/while"),
        "{unknown}"
    );
    // Bytes and operations are too few whether or not times are predicted.
    let unclocked = CompileReport {
        predicted_ms: None,
        ..unknown
    };
    assert!(
        unclocked
            .to_string()
            .contains("counted once, iterations unknown: unet/mid_block/while"),
        "{unclocked}"
    );
    let hint = TripCountHint {
        op_name: "mid_block".to_owned(),
        count: 10,
    };
    let told = report_with(&module, &[], &[hint]);
    assert_eq!(told.collectives[0].count, 10);
    assert!(told.unknown_trip_counts.is_empty());
}

#[test]
fn known_trip_counts_come_first() {
    let mut module = looping(0, None, "while");
    for i in module
        .computations
        .iter_mut()
        .flat_map(|c| &mut c.instructions)
    {
        if i.opcode == "while" {
            i.backend_config = br#"{"known_trip_count":{"n":"28"}}"#.to_vec();
        }
    }
    assert_eq!(report(&module).collectives[0].count, 28);
}

#[test]
fn groups_over_all_devices_tell_the_link() {
    // A compiler other than libtpu numbers the devices of all slices.
    let link = |groups: &[&[i64]]| {
        let mut m = Module::new(8);
        let sum = m.reducer("add");
        let mut body = Vec::new();
        let x = m.add(&mut body, parameter(0, array(F32, &[4])));
        let reduce = calling(&[sum], op("all-reduce", array(F32, &[4]), &[x]));
        m.add(&mut body, grouped(groups, reduce));
        let report = report(&m.entry(body));
        report.collectives.first().map(|c| c.link)
    };
    assert_eq!(link(&[&[0, 1, 2, 3], &[4, 5, 6, 7]]), Some(Link::Ici));
    assert_eq!(link(&[&[0, 4], &[1, 5], &[2, 6], &[3, 7]]), Some(Link::Dcn));
    assert_eq!(link(&[]), Some(Link::Dcn), "no groups: all devices");
    assert_eq!(link(&[&[0], &[1]]), None, "a group of one moves nothing");
}

#[test]
fn a_permute_moves_what_its_pairs_do() {
    let link = |pairs: &[(i64, i64)]| {
        let mut m = Module::new(8);
        let mut body = Vec::new();
        let x = m.add(&mut body, parameter(0, array(F32, &[4])));
        let mut permute = op("collective-permute", array(F32, &[4]), &[x]);
        permute.source_target_pairs = pairs
            .iter()
            .map(|&(source, target)| SourceTarget { source, target })
            .collect();
        m.add(&mut body, permute);
        let report = report(&m.entry(body));
        report.collectives.first().map(|c| c.link)
    };
    assert_eq!(link(&[(0, 1), (1, 0)]), Some(Link::Ici));
    assert_eq!(link(&[(0, 0), (1, 5)]), Some(Link::Dcn));
    assert_eq!(link(&[(0, 0), (5, 5)]), None, "every device keeps its own");
}

#[test]
fn a_collective_in_two_halves_or_many_kernels_counts_once() {
    let mut m = Module::new(4);
    let (x_shape, full) = (array(F32, &[4]), array(F32, &[16]));
    let mut inner = Vec::new();
    let p = m.add(&mut inner, parameter(0, x_shape.clone()));
    let scatter = op("all-to-all", x_shape.clone(), &[p]);
    m.add(&mut inner, grouped(ALL, scatter));
    let inner = m.computation("async_computation", inner);
    let fused: Vec<i64> = (0..3)
        .map(|_| {
            let mut body = Vec::new();
            let p = m.add(&mut body, parameter(0, x_shape.clone()));
            let gather = grouped(ALL, op("all-gather", full.clone(), &[p]));
            m.add(&mut body, attributes(&[("chain_id", "0")], gather));
            m.computation("async_collective_fusion", body)
        })
        .collect();
    let mut body = Vec::new();
    let b = &mut body;
    let x = m.add(b, parameter(0, x_shape.clone()));
    let pair = tuple(vec![x_shape.clone(), full.clone()]);
    let start = m.add(b, grouped(ALL, op("all-gather-start", pair.clone(), &[x])));
    m.add(b, op("all-gather-done", full.clone(), &[start]));
    let start = m.add(b, calling(&[inner], op("async-start", pair, &[x])));
    m.add(b, calling(&[inner], op("async-done", x_shape, &[start])));
    for fused in fused {
        m.add(
            b,
            calling(
                &[fused],
                cycles("9223372036854775807", op("fusion", full.clone(), &[x])),
            ),
        );
    }
    let mut fused = Vec::new();
    let f = &mut fused;
    let y = m.add(f, parameter(0, array(F32, &[4, 4])));
    m.add(f, dot(y, y, array(F32, &[4, 4])));
    let fused = m.computation("fused_dot", fused);
    let y = m.add(b, parameter(1, array(F32, &[4, 4])));
    let dot = op("fusion", array(F32, &[4, 4]), &[y]);
    m.add(b, calling(&[fused], cycles("9223372036854775807", dot)));
    m.add(b, cycles("5", op("negate", full, &[x])));
    let report = report(&m.entry(body));
    let mut kinds: Vec<&str> = report.collectives.iter().map(|c| c.kind.as_str()).collect();
    kinds.sort_unstable();
    assert_eq!(kinds, ["all-gather", "all-gather", "all-to-all"]);
    assert_eq!(report.ici_bytes.total(), 3 * 16);
    // The greatest integer is no prediction: a product without one is listed, collectives are not.
    let predicted = report.predicted_ms.unwrap();
    assert_eq!(predicted.total, 5.0 / 1.5e9 * 1e3);
    assert_eq!(predicted.unpredicted.len(), 1);
    let missing = &predicted.unpredicted[0];
    assert_eq!((missing.count, missing.flops), (1, 2 * 4 * 4 * 4));
}

#[test]
fn malformed_programs_are_errors() {
    let input = ReportInput {
        parameters: 0,
        memory: Memory::default(),
        slice_of_partition: &SLICES,
        weight_arguments: &[],
        clock_hz: None,
        trip_count_hints: &[],
        compile_seconds: 0.0,
    };
    let error =
        |module: &HloModuleProto| CompileReport::new(module, &input).unwrap_err().to_string();
    assert!(error(&HloModuleProto::default()).contains("no entry computation"));
    let mut dangling = training_step();
    dangling.computations[2].instructions[4].operand_ids = vec![999];
    assert!(
        error(&dangling).contains("operand 999 of "),
        "{}",
        error(&dangling)
    );
    let mut cyclic = looping(0, Some(2), "");
    let main = cyclic.entry_computation_id;
    let body = &mut cyclic.computations[0];
    let last = body.instructions.len() - 4;
    body.instructions[last].opcode = "call".to_owned();
    body.instructions[last].called_computation_ids = vec![main];
    assert!(
        error(&cyclic).contains("calls itself"),
        "{}",
        error(&cyclic)
    );
}

#[test]
fn json_has_the_documented_fields() {
    let json = serde_json::to_value(report_with(&training_step(), &[0], &[])).unwrap();
    for field in [
        "/parameters",
        "/flops/int8",
        "/memory/argument",
        "/memory/output",
        "/memory/temp",
        "/memory/code",
        "/memory/peak",
        "/memory/hbm_limit",
        "/ici_bytes/range_finding",
        "/dcn_bytes/gradient",
        "/dcn_bytes/parameter",
        "/dcn_bytes/activation",
        "/dcn_bytes/other",
        "/predicted_ms/total",
        "/predicted_ms/by_kind/dot",
        "/compile_seconds",
    ] {
        assert!(json.pointer(field).is_some(), "{field} missing in {json}");
    }
    let dcn = &json["collectives"][5];
    assert_eq!(dcn["link"], "dcn");
    assert_eq!(dcn["purpose"], "gradient");
}

#[test]
fn text_is_aligned() {
    let text = report_with(&training_step(), &[0], &[]).to_string();
    let expected = "\
parameters                     7
compile time               2.5 s
memory of one device
  arguments             4.00 GiB   25.0 %
  outputs                    0 B    0.0 %
  temporaries                0 B    0.0 %
  code                       0 B    0.0 %
  peak                  6.00 GiB   37.5 %
  limit                16.00 GiB  100.0 %
operations of dots and convolutions on one device
  int32               65536 FLOP   50.0 %
  int8                65536 FLOP   50.0 %
";
    assert!(text.starts_with(expected), "{text}");
    for line in [
        "  range finding            256 B         256 B",
        "  gradient             16.00 KiB      4.00 KiB",
        "  DCN all-reduce             4.00 KiB in    1  gradient      backward/unet/to_q/gradient/dot_general",
    ] {
        assert!(text.contains(line), "{line:?} not in\n{text}");
    }
}

/// The report of a step of two layers on four devices in two slices, made as the training program is: traced,
/// quantized, differentiated, given an optimizer and compiled.
fn compiled_training_step() -> CompileReport {
    let b = Builder::new();
    let rounding_key = Shape::new(DType::U32, [2]);
    b.input(ROUNDING_KEY, rounding_key, &[]).unwrap();
    let rate = Shape::scalar(DType::F32);
    let rate = b.input("learning_rate", rate, &[]).unwrap();
    let square = Shape::new(DType::F32, [32, 32]);
    let batch = [Some("activation_batch"), None];
    let mut x = b.input("x", square.clone(), &batch).unwrap();
    let mut weights = Vec::new();
    for layer in ["to_q", "to_out"] {
        let b = b.root("unet").scope(layer);
        let weight = b.param("weight", square.clone(), Init::Ones, &[None, None]);
        let weight = weight.unwrap();
        weights.push((b.path(), weight));
        let dims = DotDims {
            lhs_contract: vec![1],
            rhs_contract: vec![1],
            ..DotDims::default()
        };
        x = b.dot_general(x, weight, dims, DType::F32).unwrap();
    }
    let loss = b.sum(b.mul(x, x).unwrap(), &[0, 1]).unwrap();
    annotate(
        &b,
        &Policy::aqt_int8(
            "unet/",
            1,
            Vec::new(),
            &crate::models::unet::INT8_FLOAT_LAYERS,
        )
        .unwrap(),
    )
    .unwrap();
    let wrt: Vec<Tensor> = weights.iter().map(|(_, weight)| *weight).collect();
    let gradients = grad(&b, loss, &wrt).unwrap();
    let trained: Vec<Trained> = weights
        .into_iter()
        .zip(gradients)
        .map(|((name, weight), gradient)| Trained {
            name,
            weight,
            gradient,
            logical_axes: vec![None, None],
        })
        .collect();
    let options = OptimizerOptions {
        adam_b1: 0.9,
        adam_b2: 0.999,
        adam_eps: 1e-8,
        adam_weight_decay: 0.0,
        max_grad_value: None,
        max_grad_norm: None,
        ema_decay: None,
    };
    adamw(&b, &trained, loss, rate, &options).unwrap();
    let graph = lower(&b.finish()).unwrap();

    let plugin = install::locate(PluginKind::Cpu).unwrap_or_else(|error| panic!("{error}"));
    let plugin = Plugin::load(&plugin.library).unwrap();
    let devices = [("cpu_device_count".to_owned(), NamedValue::Int64(4))];
    let (parallelism, rules) = (Parallelism::default(), LogicalAxisRules::default());
    let session = Session::open(&plugin, &devices, &parallelism, rules).unwrap();
    let program = Program::compile(&session, &graph, "step", &ProgramOptions::default()).unwrap();
    let input = ReportInput {
        parameters: graph.parameter_count() as u64,
        memory: Memory::default(),
        slice_of_partition: &[0, 0, 1, 1],
        weight_arguments: &graph.weights().map(|(index, _)| index).collect::<Vec<_>>(),
        clock_hz: None,
        trip_count_hints: &[],
        compile_seconds: 0.0,
    };
    CompileReport::new(&program.executable().optimized_hlo().unwrap(), &input).unwrap()
}

#[test]
fn the_scopes_of_a_compiled_training_step_tell_gradients_and_ranges() {
    let report = compiled_training_step();
    let crossing = |purpose| {
        let all = report.collectives.iter();
        all.filter(move |c| c.link == Link::Dcn && c.purpose == purpose)
    };
    let gradients = crossing(Purpose::Gradient).filter(|c| c.op_name.contains("/gradient/"));
    let gradients: u64 = gradients.map(|c| c.bytes).sum();
    // The products of both layers, summed as s32; besides them the optimizer looks at the loss.
    assert_eq!(gradients, 4 * report.parameters, "{report}");
    assert_eq!(report.dcn_bytes.gradient, gradients + 4, "{report}");
    assert!(report.dcn_bytes.range_finding > 0, "{report}");
    for range in crossing(Purpose::RangeFinding) {
        assert!(range.op_name.contains("/range_finding/"), "{report}");
    }
}

#[test]
fn whether_a_program_fits_is_unknown_without_its_peak() {
    let fits = |peak, hbm_limit| {
        let memory = Memory {
            peak,
            hbm_limit,
            ..Memory::default()
        };
        memory.fits()
    };
    assert_eq!(fits(Some(1), Some(2)), Some(true));
    assert_eq!(fits(Some(3), Some(2)), Some(false));
    assert_eq!(fits(None, Some(2)), None);
    assert_eq!(fits(Some(1), None), None);
}
