//! What programs for GPUs call of NVIDIA's libraries, against the graphs that the calls stand for. No GPU is needed; what a GPU
//! makes of them is in `docs/performance.md`.

use maxdiff::backend::gpu::{Features, claim, rewrite};
use maxdiff::dtype::DType;
use maxdiff::emit::{DotPrecision, EmitOptions, stablehlo};
use maxdiff::graph::{Builder, Graph, evaluate};
use maxdiff::models::unet::{UNet2DConditionConfig, declare_inputs, unet};
use maxdiff::nn::{Precision, Remat};
use maxdiff::shard::{Axis, DeviceDescription, LogicalAxisRules, Mesh, Parallelism, ShardPlan};

use crate::common::{Golden, recorded, rel_l2};
use crate::tpu_kernels::{attention_layer, calls, distance};

const HOPPER: Features = Features { largest_head: 256 };

fn claimed(graph: &Graph) -> Graph {
    claim(graph, Some(HOPPER), 1).unwrap()
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
    assert_eq!(calls(&claim(&graph, Some(ampere), 1).unwrap()), 0);
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

/// A whole UNet in bfloat16, whose contractions give bfloat16 and whose attention is cuDNN's, beside the same without.
#[test]
fn a_unet_in_the_form_for_gpus_is_as_near_to_diffusers() {
    let io = Golden::read("unet_sdxl/io.safetensors");
    let checkpoint = Golden::read_folder("unet_sdxl", "diffusion_pytorch_model");
    let config = Golden::text("unet_sdxl/config.json");
    let config = UNet2DConditionConfig::from_json(&config).unwrap();
    let [batch, _, height, width] = io.dims("in/sample").try_into().unwrap();
    let length = io.dims("in/encoder_hidden_states")[1];
    let precision = Precision {
        weights: DType::F32,
        activations: DType::BF16,
    };
    let b = Builder::new();
    let dims = [batch, height, width, length];
    let inputs = declare_inputs(&b, &config, dims, DType::BF16).unwrap();
    let y = unet(&b, &config, inputs, precision, Remat::None).unwrap();
    let y = b.convert(y, DType::F32).unwrap();
    b.output("out/sample", y, None).unwrap();
    let graph = b.finish();
    let values = recorded(&graph, &checkpoint, &io);

    let with = claimed(&graph);
    // Four transformers' self-attention and cross-attention, at the least.
    assert!(calls(&with) >= 8, "{}", calls(&with));
    let with = rewrite(&with.inline_composites(&|_, _| true)).unwrap();
    let [without, with] = [&graph, &with].map(|graph| {
        let found = evaluate(graph, &values).unwrap();
        rel_l2(&found[0], &io, "out/sample")
    });
    eprintln!("relative error {without:.2e}, in the form for GPUs {with:.2e}");
    assert!(with <= 1.2 * without, "{with} and {without}");
    assert!(without <= 2e-2, "{without}");
}
