//! Programs built by hand in the forms libtpu 0.0.51 writes.

mod compiled;
mod library;
mod loops;
mod traffic;

use super::*;
use crate::proto::xla::{
    CollectiveDeviceListProto, DeviceAssignmentProto, DotDimensionNumbers, FrontendAttributes,
    HloComputationProto, HloInstructionProto, LiteralProto, OpMetadata, PrimitiveType,
    ReplicaGroup, ShapeProto, SourceTarget, hlo_instruction_proto::ReplicaGroupList,
};
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
            kernel_cycles: &BTreeMap::new(),
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

/// The compiler estimates nothing for pads: a large one is listed; what a small one takes does not tell.
#[test]
fn large_moves_without_an_estimate_are_not_predicted() {
    let mut m = Module::new(1);
    let mut body = Vec::new();
    let b = &mut body;
    let x = m.add(b, parameter(0, array(F32, &[512, 512])));
    let zero = m.add(b, op("constant", array(F32, &[]), &[]));
    let pad = |name: &str, dims: &[i64]| named(name, op("pad", array(F32, dims), &[x, zero]));
    let large = m.add(b, pad("large", &[1024, 512]));
    m.add(b, pad("small", &[8, 8]));
    let sum = op("add", array(F32, &[1024, 512]), &[large, large]);
    m.add(b, cycles("1000", sum));
    let predicted = report(&m.entry(body)).predicted_ms.unwrap();
    let missing = predicted.unpredicted.iter();
    assert_eq!(missing.map(|u| &u.op_name).collect::<Vec<_>>(), ["large"]);
    assert_eq!(
        predicted.by_kind.keys().collect::<Vec<_>>(),
        ["elementwise"]
    );
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
fn malformed_programs_are_errors() {
    let input = ReportInput {
        parameters: 0,
        memory: Memory::default(),
        slice_of_partition: &SLICES,
        weight_arguments: &[],
        clock_hz: None,
        trip_count_hints: &[],
        kernel_cycles: &BTreeMap::new(),
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
