use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::data::word_level_json;

/// Texts and weights; a break is `("|", 0)`.
fn parts(prompt: &str) -> Vec<(String, f64)> {
    let parts = parse_weighted(prompt).unwrap();
    let part = |part| match part {
        PromptPart::Text { text, weight } => (text, weight),
        PromptPart::Break => ("|".to_owned(), 0.0),
    };
    parts.into_iter().map(part).collect()
}

#[track_caller]
fn assert_parts(prompt: &str, expected: &[(&str, f64)]) {
    let found = parts(prompt);
    let same = |(found, expected): (&(String, f64), &(&str, f64))| {
        found.0 == expected.0 && (found.1 - expected.1).abs() < 1e-12
    };
    let fits = found.len() == expected.len() && found.iter().zip(expected).all(same);
    assert!(fits, "{prompt:?}: {found:?}, expected {expected:?}");
}

#[test]
fn prompt_editing_is_refused_by_name() {
    for editing in ["[red:blue:0.5]", "[red::0.5]", "[red:0.5 ]", "[red|blue]"] {
        let error = parse_weighted(&format!("a {editing} cat")).unwrap_err();
        let expected = format!("`{editing}` would change the prompt from step to step");
        assert!(error.to_string().contains(&expected), "{error}");
    }
    assert_parts("[ratio 1:b]", &[("ratio 1:b", 1.0 / 1.1)]);
    assert_parts(r"\[red|blue\]", &[("[red|blue]", 1.0)]);
}

#[test]
fn brackets_weigh() {
    assert_parts("a cat", &[("a cat", 1.0)]);
    assert_parts("", &[("", 1.0)]);
    assert_parts("()", &[("", 1.0)]);
    assert_parts("a (red) cat", &[("a ", 1.0), ("red", 1.1), (" cat", 1.0)]);
    assert_parts("((red))", &[("red", 1.1 * 1.1)]);
    assert_parts("[red]", &[("red", 1.0 / 1.1)]);
    assert_parts("(red:1.3)", &[("red", 1.3)]);
    assert_parts("(red: 1.3 )", &[("red", 1.3)]);
    assert_parts(
        "(red:.5)(blue:-1)(green:+2.)",
        &[("red", 0.5), ("blue", -1.0), ("green", 2.0)],
    );
    assert_parts("(a (b:2) c:3)", &[("a ", 3.0), ("b", 6.0), (" c", 3.0)]);
    assert_parts("[a (b:2)]", &[("a ", 1.0 / 1.1), ("b", 2.0 / 1.1)]);
    assert_parts("((a:1.5)b)", &[("a", 1.5 * 1.1), ("b", 1.1)]);
    assert_parts("猫(🦊:1.2)", &[("猫", 1.0), ("🦊", 1.2)]);
    assert_parts(
        "ink (((fox:1.2)) [in] snow (moon:0.4)) (((night)))!",
        &[
            ("ink ", 1.0),
            ("fox", 1.2 * 1.1 * 1.1),
            (" ", 1.1),
            ("in", 1.0),
            (" snow ", 1.1),
            ("moon", 0.44),
            (" ", 1.0),
            ("night", 1.331),
            ("!", 1.0),
        ],
    );
    // Neighbours of equal weight are one part.
    assert_parts("(a)(b) c", &[("ab", 1.1), (" c", 1.0)]);
    assert_parts("([a])b", &[("ab", 1.0)]);
    // Nothing at all, but of another weight, stands between these.
    assert_parts("a(\\:2)b", &[("a", 1.0), ("b", 1.0)]);
}

#[test]
fn odd_brackets_and_escapes_are_read_to_the_end() {
    assert_parts("a (b [c", &[("a ", 1.0), ("b ", 1.1), ("c", 1.0)]);
    assert_parts("a) b] (c", &[("a) b] ", 1.0), ("c", 1.1)]);
    assert_parts("a:1.3) b", &[("a:1.3) b", 1.0)]);
    // The weight closes a round bracket only.
    assert_parts("[a:b]", &[("a:b", 1.0 / 1.1)]);
    assert_parts("(a:b:1.2)", &[("a:b", 1.2)]);
    assert_parts("(a:1.2", &[("a:1.2", 1.1)]);
    assert_parts("(a:)", &[("a:", 1.1)]);
    assert_parts("(a:-)", &[("a:-", 1.1)]);
    assert_parts("(a:1e3)", &[("a:1e3", 1.1)]);
    assert_parts("(a\\)b)", &[("a)b", 1.1)]);
    assert_parts("\\\\ \\[x\\] \\n \\", &[("\\ [x] n ", 1.0)]);
    assert_parts("(a\\:1.2)", &[("a", 1.2)]);
}

#[test]
fn breaks_cut() {
    assert_parts("a BREAK b", &[("a", 1.0), ("|", 0.0), ("b", 1.0)]);
    assert_parts(
        "a\n BREAK \nBREAK b",
        &[("a", 1.0), ("|", 0.0), ("|", 0.0), ("b", 1.0)],
    );
    assert_parts("BREAK", &[("|", 0.0)]);
    assert_parts(
        "a BREAKS, daYBREAK BREAK_ break",
        &[("a BREAKS, daYBREAK BREAK_ break", 1.0)],
    );
    assert_parts("a,BREAK,b", &[("a,", 1.0), ("|", 0.0), (",b", 1.0)]);
    assert_parts("(a BREAK b:2)", &[("a", 2.0), ("|", 0.0), ("b", 2.0)]);
    assert_parts("(a)BREAK[b]", &[("a", 1.1), ("|", 0.0), ("b", 1.0 / 1.1)]);
    assert_parts("猫BREAK", &[("猫BREAK", 1.0)]);
}

#[test]
fn impossible_weights_are_named() {
    let error = |prompt: &str| parse_weighted(prompt).unwrap_err().to_string();
    assert!(error("(a:1.2.3)").contains("`1.2.3`"));
    assert!(error("(a:.)").contains("(word:1.3)"));
    assert!(error(&format!("(a:{})", "9".repeat(400))).contains("not a number"));
    assert!(error(&format!("{}deep", "(".repeat(1000))).contains("`deep`"));
    assert!(error(&" ".repeat(MAX_PROMPT_BYTES + 1)).contains("16385 bytes"));
}

/// A word-level tokenizer of `a` to `f`, the comma and the words of a break.
fn tokenizer(length: usize) -> Tokenizer {
    let json = word_level_json(["a b c d e f , a , , , , , , , BREAK ( ) :"]).unwrap();
    Tokenizer::from_json(&json, length).unwrap()
}

/// The words of each chunk, `<` and `>` for start and end.
fn chunks(tokenizer: &Tokenizer, prompt: &str) -> Vec<String> {
    let id = |word: &str| tokenizer.pieces(word).unwrap()[0].id;
    let words: Vec<(i32, &str)> = ["a", "b", "c", "d", "e", "f", ","]
        .map(|w| (id(w), w))
        .into();
    let name = |id: &i32| match id {
        0 => "<",
        1 => ">",
        _ => words
            .iter()
            .find(|(known, _)| known == id)
            .map_or("?", |(_, word)| word),
    };
    let encoded = encode_prompt(tokenizer, prompt, PromptSyntax::Weighted).unwrap();
    encoded
        .chunks
        .iter()
        .map(|chunk| chunk.ids.iter().map(name).collect())
        .collect()
}

#[test]
fn long_prompts_take_as_many_chunks_as_they_need() {
    let tokenizer = tokenizer(6);
    assert_eq!(chunks(&tokenizer, ""), ["<>>>>>"]);
    assert_eq!(chunks(&tokenizer, "a b c d"), ["<abcd>"]);
    assert_eq!(chunks(&tokenizer, "a b c d e"), ["<abcd>", "<e>>>>"]);
    assert_eq!(chunks(&tokenizer, "a BREAK b"), ["<a>>>>", "<b>>>>"]);
    assert_eq!(chunks(&tokenizer, "BREAK b BREAK"), ["<>>>>>", "<b>>>>"]);
    // What follows the last comma moves on with the next word.
    assert_eq!(chunks(&tokenizer, "a, b c d"), ["<a,>>>", "<bcd>>"]);
    assert_eq!(chunks(&tokenizer, "a, b c"), ["<a,bc>"]);
    assert_eq!(chunks(&tokenizer, "a b c, d"), ["<abc,>", "<d>>>>"]);
    assert_eq!(chunks(&tokenizer, "a b c d, e"), ["<abcd>", "<,e>>>"]);
    // A comma that no longer fits starts the next chunk and is not moved behind.
    assert_eq!(chunks(&tokenizer, ", a b c, d"), ["<,abc>", "<,d>>>"]);
}

#[test]
fn a_comma_far_back_keeps_its_place() {
    let tokenizer = tokenizer(32);
    // 30 words fit; the comma is 20, then 21 places before the end of them.
    let prompt = |before, after| format!("{}, {}", "a ".repeat(before), "b ".repeat(after));
    let near = chunks(&tokenizer, &prompt(10, 20));
    assert_eq!(near[0], format!("<{},{}", "a".repeat(10), ">".repeat(20)));
    assert_eq!(near[1], format!("<{}{}", "b".repeat(20), ">".repeat(11)));
    let far = chunks(&tokenizer, &prompt(9, 21));
    assert_eq!(far[0], format!("<{},{}>", "a".repeat(9), "b".repeat(20)));
    assert_eq!(far[1], format!("<b{}", ">".repeat(30)));
}

#[test]
fn weights_lie_on_their_tokens() {
    let tokenizer = tokenizer(6);
    let encode = |prompt| encode_prompt(&tokenizer, prompt, PromptSyntax::Weighted).unwrap();
    let encoded = encode("a (b c:2) [d] e");
    let down = (1.0 / 1.1) as f32;
    let expected = [1.0, 1.0, 2.0, 2.0, down, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
    assert_eq!(encoded.weights(), expected);
    assert_eq!(encoded.ids().len(), 12);
    assert!(encoded.warnings.is_empty());
    let warnings = encode("(zebra:1.2) and").warnings;
    assert!(warnings[0].contains("\"zebra\", \"and\""), "{warnings:?}");
}

#[test]
fn an_added_token_has_its_weight_and_stays_in_one_chunk() {
    let mut tokenizer = tokenizer(6);
    let added = tokenizer.add_token("<cat>", 3).unwrap();
    let encode = |prompt| encode_prompt(&tokenizer, prompt, PromptSyntax::Weighted).unwrap();
    let encoded = encode("a b (<cat>:2)");
    assert_eq!(
        encoded.chunks[1].ids,
        [0, added, added + 1, added + 2, 1, 1]
    );
    assert_eq!(encoded.chunks[1].weights, [1.0, 2.0, 2.0, 2.0, 1.0, 1.0]);
    assert_eq!(encode("a <cat>").chunks.len(), 1);
}

#[test]
fn plain_takes_brackets_literally_and_names_what_it_drops() {
    let tokenizer = tokenizer(6);
    let prompt = "(a b:2) BREAK c";
    let encoded = encode_prompt(&tokenizer, prompt, PromptSyntax::Plain).unwrap();
    let plain = tokenizer.encode(prompt).unwrap();
    assert_eq!(encoded.ids(), plain.ids);
    assert_eq!(encoded.weights(), [1.0; 6]);
    assert_eq!(plain.dropped, ["2", ")", "BREAK", "c"]);
    assert!(
        encoded.warnings[1].contains("\"BREAK\", \"c\" dropped"),
        "{encoded:?}"
    );
}

#[test]
fn prompts_without_syntax_have_the_ids_of_plain_encoding() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tokenizer");
    let tokenizer = Tokenizer::from_dir(&folder, 77).unwrap();
    let cases = std::fs::read(folder.join("cases.json")).unwrap();
    let cases: serde_json::Value = serde_json::from_slice(&cases).unwrap();
    let mut compared = 0;
    for prompt in cases["prompts"].as_array().unwrap() {
        let prompt = prompt.as_str().unwrap();
        let plain = tokenizer.encode(prompt).unwrap();
        if prompt.contains(['(', ')', '[', ']', '\\']) || !plain.dropped.is_empty() {
            continue;
        }
        let weighted = encode_prompt(&tokenizer, prompt, PromptSyntax::Weighted).unwrap();
        assert_eq!(weighted.ids(), plain.ids, "{prompt:?}");
        assert!(weighted.weights().iter().all(|weight| *weight == 1.0));
        compared += 1;
    }
    assert!(compared > 450, "{compared}");
}

#[test]
fn prompts_of_an_image_get_as_many_chunks() {
    let (first, second) = (tokenizer(6), tokenizer(8));
    let encode =
        |tokenizer, prompt| encode_prompt(tokenizer, prompt, PromptSyntax::Weighted).unwrap();
    let mut prompts = [
        encode(&first, "a b c d e"),
        encode(&first, ""),
        encode(&second, "a b c d e"),
        encode(&second, "a"),
    ];
    let [a, b, c, d] = &mut prompts;
    assert_eq!(align_chunks(&mut [a, b, c, d]), 2);
    for (prompt, length) in prompts.iter().zip([6, 6, 8, 8]) {
        assert_eq!(prompt.ids().len(), 2 * length);
        assert_eq!(prompt.weights().len(), 2 * length);
    }
    assert_eq!(prompts[1].chunks[1], prompts[1].chunks[0]);
    assert_eq!(prompts[3].chunks[1].ids, [0, 1, 1, 1, 1, 1, 1, 1]);
    assert_eq!(align_chunks(&mut []), 0);
}

#[test]
fn weights_act_and_the_mean_stays() {
    // Two chunks of three tokens with two features; the second has weights 1.
    let hidden = [
        0.5,
        1.0,
        -2.0,
        4.0,
        3.0,
        0.25,
        1.0,
        2.0,
        3.0,
        4.0,
        5.0,
        f32::MIN_POSITIVE,
    ];
    let weights = [1.0, 1.5, 0.5, 1.0, 1.0, 1.0];
    let mut found = hidden;
    apply_weights(&mut found, &weights, 3).unwrap();
    let mean = |values: &[f32]| values.iter().sum::<f32>() / values.len() as f32;
    assert!((mean(&found[..6]) - mean(&hidden[..6])).abs() < 1e-6);
    // Sums: 6.75 before, 1.5 + 3 + 1.625 after.
    let scale = 6.75 / 6.125;
    for (k, value) in found[..6].iter().enumerate() {
        let expected = hidden[k] * weights[k / 2] * scale;
        assert!((value - expected).abs() < 1e-6, "{k}: {value} {expected}");
    }
    assert_eq!(found.map(f32::to_bits)[6..], hidden.map(f32::to_bits)[6..]);
}

#[test]
fn a_mean_of_zero_scales_nothing() {
    let mut hidden = [1.0, -1.0, 2.0, -2.0];
    apply_weights(&mut hidden, &[2.0, 1.0], 2).unwrap();
    assert_eq!(hidden, [2.0, -2.0, 2.0, -2.0]);
    // The weights make the mean zero.
    let mut hidden = [1.0, 1.0, 2.0, 2.0];
    apply_weights(&mut hidden, &[2.0, -1.0], 2).unwrap();
    assert_eq!(hidden, [2.0, 2.0, -2.0, -2.0]);
    let mut hidden = [1.0, 2.0];
    apply_weights(&mut hidden, &[0.0, 0.0], 2).unwrap();
    assert_eq!(hidden, [0.0, 0.0]);
}

#[test]
fn hidden_states_of_another_size_are_refused() {
    let refuse = |hidden: usize, weights: usize, length: usize| {
        let result = apply_weights(&mut vec![1.0; hidden], &vec![2.0; weights], length);
        assert!(matches!(result, Err(PromptError::HiddenStates { .. })));
    };
    refuse(6, 4, 2);
    refuse(6, 3, 2);
    refuse(6, 3, 0);
    refuse(0, 2, 2);
    refuse(2, 0, 2);
    apply_weights(&mut [], &[], 2).unwrap();
}

proptest! {
    #[test]
    fn any_text_is_read(prompt in "[a-c ()\\[\\]:.0-9\\\\+\\-,猫\u{a0}BREAK]{0,60}") {
        if let Ok(parts) = parse_weighted(&prompt) {
            prop_assert!(!parts.is_empty());
            // Every letter survives, in order.
            let letters = |text: &str| -> String {
                text.chars().filter(|c| "abc猫".contains(*c)).collect()
            };
            let text = |part: &PromptPart| match part {
                PromptPart::Text { text, .. } => letters(text),
                PromptPart::Break => String::new(),
            };
            let found: String = parts.iter().map(text).collect();
            prop_assert_eq!(found, letters(&prompt));
        }
    }
}
