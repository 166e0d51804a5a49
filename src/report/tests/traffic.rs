//! What moves between devices, over which links and what for.

use super::*;

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
