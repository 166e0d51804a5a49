//! What programs for GPUs call of NVIDIA's libraries, against the graphs that the calls stand for. No GPU is needed; what a GPU
//! makes of them is in `docs/performance.md`.

use maxdiff::backend::gpu::{Features, claim};
use maxdiff::emit::{DotPrecision, EmitOptions, stablehlo};
use maxdiff::graph::Graph;
use maxdiff::shard::{Axis, DeviceDescription, LogicalAxisRules, Mesh, Parallelism, ShardPlan};

use crate::tpu_kernels::{attention_layer, calls, distance};

const HOPPER: Features = Features { largest_head: 256 };

fn claimed(graph: &Graph) -> Graph {
    claim(graph, HOPPER).unwrap()
}

#[test]
fn attention_is_its_body() {
    for (case, causal) in [
        ([2, 2, 19, 77, 64], false),
        ([1, 3, 12, 5, 40], false),
        ([1, 2, 9, 9, 64], true),
        ([1, 1, 1, 5, 256], false),
    ] {
        let graph = attention_layer(case, causal);
        let kernel = claimed(&graph);
        assert_eq!(calls(&kernel), 1, "{case:?}");
        // Both round to bf16, by up to 2^-9; the body rounds its weights too.
        let error = distance(&graph, &kernel);
        assert!(error <= 4e-3, "{case:?}: {error}");
    }
}

#[test]
fn heads_that_cudnn_does_not_take_stay_as_they_are() {
    for case in [[1, 2, 8, 8, 20], [1, 1, 8, 8, 264]] {
        assert_eq!(
            calls(&claimed(&attention_layer(case, false))),
            0,
            "{case:?}"
        );
    }
    let ampere = Features::of_compute_capability("8.0").unwrap();
    let graph = attention_layer([1, 1, 8, 8, 160], false);
    assert_eq!(calls(&claim(&graph, ampere).unwrap()), 0);
    assert_eq!(Features::of_compute_capability("9.0"), Some(HOPPER));
    for older in ["7.5", "", "x.1"] {
        assert_eq!(Features::of_compute_capability(older), None, "{older}");
    }
}

#[test]
fn the_call_has_the_shapes_and_layouts_that_xla_asks_for() {
    let graph = claimed(&attention_layer([2, 3, 5, 7, 16], false));
    let text = stablehlo(&graph, "toy", &EmitOptions::default());
    let call = "(tensor<2x5x3x16xbf16>, tensor<2x7x3x16xbf16>, tensor<2x7x3x16xbf16>) -> (tensor<2x3x5x16xbf16>, \
                tensor<0xui8>)";
    for part in [
        "stablehlo.custom_call @__cudnn$fmhaSoftmax(",
        r#"\22dimensions\22:[\222\22,\223\22,\225\22,\227\22]"#,
        r#"\22fmha_scale\22:0.25"#,
        "result_layouts = [dense<[3, 1, 2, 0]> : tensor<4xindex>, dense<[0]> : tensor<1xindex>]",
        call,
        "#0, dims = [0, 2, 1, 3] : (tensor<2x3x5x16xbf16>) -> tensor<2x5x3x16xbf16>",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn devices_share_the_calls_by_batch_entries() {
    let graph = claimed(&attention_layer([4, 1, 8, 8, 16], true));
    let parallelism = Parallelism {
        ici: Axis::ALL.map(|axis| if axis == Axis::Data { 4 } else { 1 }),
        ..Parallelism::default()
    };
    let devices = DeviceDescription::numbered(4, 1);
    let mesh = Mesh::new(&parallelism, &devices).unwrap();
    let plan = ShardPlan::new(&graph, &mesh, &LogicalAxisRules::default()).unwrap();
    let options = EmitOptions {
        sharding: plan.text(&mesh),
        precision: DotPrecision::Default,
    };
    let text = stablehlo(&graph, "toy", &options);
    assert!(text.contains("sdy.manual_computation"), "{text}");
    assert!(
        text.contains("-> (tensor<1x1x8x16xbf16>, tensor<0xui8>)"),
        "{text}"
    );
}
