//! How often loops run.

use super::*;

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
