"""A small tokenizer in CLIP's format, and the ids that transformers' CLIPTokenizer gives for hard prompts.

Usage: python tokenizer.py

CLIP's own vocabulary is not shipped here, so a byte pair encoding is learned below from made-up prompts in several
scripts, in CLIP's layout: the 256 byte characters (`!` is 0), the same with `</w>`, the merges, start and end token.

Writes tests/golden/tokenizer/vocab.json and merges.txt, and cases.json:
    prompts    texts
    variants   ways in which a checkpoint names its special tokens: the `files` that lie beside vocab.json and
               merges.txt, `pad` (id of the padding token), and `ids`, for each prompt what
               tokenizer(prompt, padding="max_length", truncation=True, max_length=77) gives without the padding at its
               end; null where they are those of the first variant. Variants after the second have the first
               prompts only.
The first two variants are also saved as tokenizer.json and read again, which must give the same.
"""

import collections
import json
import pathlib
import tempfile
import unicodedata

import tokenizers
import transformers
from transformers import CLIPTokenizer

from common import GOLDEN, report, rng

FOLDER = GOLDEN / "tokenizer"
MERGES = 1500
LENGTH = 77
START, END = "<|startoftext|>", "<|endoftext|>"

WORDS = {
    "adjectives": "small large red green blue golden ancient tiny misty glowing rusty quiet painted wooden frozen "
                  "bright dark soft cinematic detailed hyperrealistic watercolor vintage translucent ornate weathered",
    "nouns": "cat dog castle forest mountain river lighthouse robot astronaut dragon teapot violin library garden "
             "harbour city portrait landscape butterfly train bridge market desert island mushroom clock owl whale",
    "places": "beach hill roof lake cliff street valley meadow station planet table snow rain sunset moonlight",
    "styles": "oil painting, pencil sketch, digital art, concept art, photograph, woodcut, isometric render, "
              "low poly model, studio lighting, soft focus, wide angle, macro shot, bokeh",
    "russian": "маленький красный замок в тёмном лесу под снегом кошка смотрит на луну высокие горы и река",
    "greek": "μικρό γαλάζιο σπίτι δίπλα στη θάλασσα το φως του ήλιου πέφτει στο παλιό λιμάνι",
    "arabic": "قطة صغيرة تجلس على سطح البيت القديم تحت ضوء القمر والنجوم",
    "hebrew": "חתול קטן יושב על גג הבית הישן מתחת לאור הירח",
    "hindi": "एक छोटी लाल बिल्ली पुराने घर की छत पर चाँद की रोशनी में बैठी है",
    "thai": "แมวตัวเล็กสีแดงนั่งอยู่บนหลังคาบ้านเก่าใต้แสงจันทร์",
    "chinese": "一只小红猫坐在老房子的屋顶上 月光下的山水画 水墨风格 高清 细节丰富",
    "japanese": "小さな赤い猫が古い家の屋根に座っている 月の光 アニメ風 カタカナ 美しい風景",
    "korean": "작은 빨간 고양이가 오래된 집 지붕 위에 앉아 있다 달빛 아래 풍경",
    "accented": "café piñata naïve façade Ångström übergroß crème brûlée jalapeño Zürich smörgåsbord",
}
EMOJI = ["🎈", "🦊", "👩‍🚀", "👨‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "❤️", "🇧🇷", "🧑🏿‍🎨", "☃", "1️⃣", "🫠"]
LISTS = {name: text.split(", ") if name == "styles" else text.split() for name, text in WORDS.items()}
FOREIGN = [name for name in LISTS if name not in ("adjectives", "nouns", "places", "styles")]
PUNCTUATION = [",", ".", "!", "?", ";", ":", "...", "!!!", "?!", " - ", "--", "/", "&", "'s", "(", ")", "[", "]", "#",
               "@", "\"", "'", "*", "_", "~", "%", "^", "=", "+", "|", "<", ">", "$", "`", "\\"]
HARD = [
    "", " ", "   ", "\n", "\t\t", "a", "A", "!", "!!", "!!!", "a!", "!a", "a ! b", "¡hola!", "don't", "DON'T",
    "don’t", "it's we're I'll you've I'm he'd can't", "'s", "''s", "'S 'T 'RE", "s's's", "'sa", "rock'n'roll",
    "o'clock's", "a photo of a cat", "A Photo Of A Cat", "a  photo   of\ta\ncat", "  leading and trailing  ", "a,b,c",
    "a , b , c", "2024", "1234567890", "3.14159", "1,000,000", "16k 8K 4k", "50mm f/1.8", "v2.1-beta", "٣٤٥", "१२३",
    "½ ¾ Ⅷ ² ³", "①②③", "(masterpiece:1.3), [blurry], ((best quality))", "\\(escaped\\)", "a:b", "::::", "....",
    "-----", "!?!?!?", "({[<>]})", "<|startoftext|>", "<|endoftext|>", "<|startoftext|>a cat<|endoftext|>",
    "a<|endoftext|>b", "a <|endoftext|> b !", "<|ENDOFTEXT|>", "<|StartOfText|>", "<|endoftext|>!!",
    "!<|endoftext|>!", "!!<|startoftext|>x", "<|endoftext|", "<|endoftext |>", "<|unk|>",
    "<|endoftext|><|endoftext|>", "<|endoftext|>'s", "don<|startoftext|>'t", "</w>", "a</w>", "</w></w>",
    "cat</w> dog", "</W>", "<pad>", "<unk>", "Ġa", "Ċ", "ā Ă ą", "Ġ</w>", "#version: 0.2", "é", "e\u0301",
    "e\u0301\u0301\u0301", "\u0301", "\u0301a", "ﬁ ﬂ", "Å Å Å", "ñ n\u0303",
    "Z\u0351\u036bA\u0343L\u0337G\u0335O\u0334", "İstanbul", "ıİiI", "ΣΊΣΥΦΟΣ", "ὈΔΥΣΣΕΎΣ", "ß ẞ SS", "ǅ ǆ Ǆ",
    "ＦＵＬＬＷＩＤＴＨ １２３ ！", "ᏣᎳᎩ ꭳꮹꭸ", "𝕱𝖆𝖓𝖈𝖞 𝟙𝟚𝟛", "ʻokina", "가", "\u1100\u1161", "ㄱㅏ", "がぎぐ", "か\u3099", "々〆ヶ", "。、「」",
    "你好，世界！", "ไทย ๑๒๓", "हिन्दी क्षेत्र", "தமிழ்", "မြန်မာ", "ﷺ", "لا إله", "שלום\u05b0", "ქართული Ქ", "Հայերեն",
    "አማርኛ", "🎈", "🎈🎈🎈", "a🎈b", "🎈 a", "👩‍🚀", "👨‍👩‍👧‍👦 family", "🏳️‍🌈!", "👍🏽👍🏿", "❤️ ❤", "🇧🇷🇯🇵", "1️⃣2️⃣", "☃️☃",
    "a\u200db", "a\u200bb", "a\u00adb", "\ufeffa", "a\ufeff", "\u200e\u200fa", "a\u2060b", "a\u00a0b", "a\u3000b",
    "a\u2028b\u2029c", "a\u0085b", "a\u1680b", "a\u180eb", "a\u202fb", "a\u205fb", "\u2003a\u2009b", "a\x00b", "\x00",
    "a\x01\x02b", "a\x1cb\x1fc", "a\x7fb", "a\x80\x9fb", "a\x0bb\x0cc", "a\r\nb\rc", "\ufffd", "\ufffe", "\U0010ffff",
    "\ue000", "\U000e0041", "a_b", "snake_case_name", "__init__", "e-mail: a@b.co", "https://example.com/a?b=c&d=e#f",
    "C:\\dir\\file.png", "#hashtag", "100%", "$5.99", "€5 £6 ¥7", "a+b=c", "x^2", "~/.config", "`code`",
    "“quoted” ‘text’", "«guillemets»", "— – ‐ ―", "…", "† ‡ • ·", "°C", "™ ® ©", "→ ⇒ ↦", "∀x∈ℝ", "♠♥♦♣", "█▓▒░",
    "\u20ac\u0301", "ab12cd34", "12ab34cd", "a1b2", "1a", "été2024!", "café's", "猫's", "🎈's", "x" * 30, "x" * 400,
    "!" * 100, "1" * 90, "猫" * 80, "🎈" * 60, "a " * 74, "a " * 75, "a " * 76, "a " * 200,
    ("a " * 74) + "<|endoftext|>", ("a " * 75) + "<|endoftext|>", ("a " * 74) + "butterfly lighthouse",
    ("! " * 75) + "end", "supercalifragilisticexpialidocious antidisestablishmentarianism", "\u0e33\u0e4d\u0e32",
    "ꓘ Ꙁ ꙁ", "\U00010400\U00010428", "\U0001e900\U0001e922", "ℵ ℓ ℮", "ª º", "ˢᵘᵖ ₛᵤᵦ", "ⅰⅠ ↀ", "〇一二三", "㊀㋿",
    "Ω Ω K K", "a\u034fb", "\u0f73\u0f75", "\u0344", "\u2126\u212a\u212b",
]


def prompt(gen) -> str:
    """One prompt of the grammar: phrases in English and other scripts, punctuation, emoji, odd case and white space."""
    pick = lambda items: items[int(gen.integers(len(items)))]
    parts = []
    for _ in range(int(gen.integers(1, 8))):
        kind = int(gen.integers(10))
        if kind < 4:
            parts.append(f"{pick(['a', 'the', 'one'])} {pick(LISTS['adjectives'])} {pick(LISTS['nouns'])} "
                         f"{pick(['on a', 'under the', 'near the', 'in'])} {pick(LISTS['places'])}")
        elif kind < 5:
            parts.append(pick(LISTS["styles"]))
        elif kind < 8:
            words = LISTS[pick(FOREIGN)]
            parts.append(" ".join(pick(words) for _ in range(int(gen.integers(1, 6)))))
        elif kind < 9:
            parts.append("".join(pick(EMOJI) for _ in range(int(gen.integers(1, 4)))))
        else:
            parts.append(str(int(gen.integers(10 ** int(gen.integers(1, 7))))))
    text = parts[0]
    for part in parts[1:]:
        text += pick([" ", ", ", " ", ", ", pick(PUNCTUATION), "  ", "\n", "\u00a0", "", "\u3000"]) + part
    case = int(gen.integers(8))
    if case == 0:
        text = text.upper()
    elif case == 1:
        text = text.title()
    elif case == 2:
        text = unicodedata.normalize("NFD", text)
    if gen.integers(12) == 0:
        at = int(gen.integers(len(text) + 1))
        text = text[:at] + pick([START, END, "</w>", "!", "\u200d", "\ufe0f", "'s", "\x07"]) + text[at:]
    if gen.integers(10) == 0:
        text = f"{text} {text} {text}"
    return text


def byte_characters() -> dict:
    """The characters that stand for bytes, in the order of CLIP's first 256 ids, each with its byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def learn(texts) -> list:
    """Merges of a byte pair encoding: the most frequent pair each time, the smaller one of two as frequent."""
    empty = CLIPTokenizer()
    counts = collections.Counter()
    for text in texts:
        text = empty.backend_tokenizer.normalizer.normalize_str(text)
        counts.update(piece for piece, _ in empty.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text))
    assert all(set(word) <= set(byte_characters()) for word in counts)
    words = {word: [*word[:-1], word[-1] + "</w>"] for word in sorted(counts)}
    merges = []
    while len(merges) < MERGES:
        pairs = collections.Counter()
        for word, symbols in words.items():
            for pair in zip(symbols, symbols[1:]):
                pairs[pair] += counts[word]
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for word, symbols in words.items():
            merged = []
            for symbol in symbols:
                if merged and not merged[-1][1] and (merged[-1][0], symbol) == best:
                    merged[-1] = (merged[-1][0] + symbol, True)
                else:
                    merged.append((symbol, False))
            words[word] = [symbol for symbol, _ in merged]
    return merges


def variants(start: int, end: int) -> list:
    """Names, files and padding tokens, in the ways in which published checkpoints have them."""
    typed = lambda c: {"__type": "AddedToken", "content": c, "lstrip": False, "normalized": True, "rstrip": False,
                       "single_word": False}
    plain = lambda c, **more: {"content": c, "lstrip": False, "normalized": True, "rstrip": False,
                               "single_word": False} | more
    config = {"add_prefix_space": False, "bos_token": typed(START), "do_lower_case": True, "eos_token": typed(END),
              "errors": "replace", "model_max_length": LENGTH, "pad_token": END, "tokenizer_class": "CLIPTokenizer",
              "unk_token": typed(END)}
    names = {"bos_token": plain(START), "eos_token": plain(END), "pad_token": END, "unk_token": plain(END)}
    decoder = {str(start): plain(START, special=True), str(end): plain(END, normalized=False, special=True)}
    strings = {"bos_token": START, "eos_token": END, "unk_token": END, "model_max_length": LENGTH}
    zero = {"0": plain("!", normalized=False, special=True)}
    return [
        ("sd1", END, {"tokenizer_config.json": config, "special_tokens_map.json": names}),
        ("sdxl_2", "!", {"tokenizer_config.json": strings | {"pad_token": "!", "added_tokens_decoder": zero | decoder},
                         "special_tokens_map.json": {"bos_token": START, "eos_token": END, "pad_token": "!",
                                                     "unk_token": END},
                         "added_tokens.json": {"!": 0, END: end, START: start}}),
        ("sd2", "!", {"tokenizer_config.json": config | {"pad_token": END},
                      "special_tokens_map.json": names | {"pad_token": "!"}}),
        ("sdxl_1", END, {"tokenizer_config.json": strings | {"pad_token": END, "added_tokens_decoder": decoder}}),
        ("bare", END, {}),
        ("map_only", "!", {"special_tokens_map.json": names | {"pad_token": plain("!")}}),
        ("concepts", END, {"tokenizer_config.json": config, "special_tokens_map.json": names,
                           "added_tokens.json": {"<my-cat>": end + 1, "<My-Dog>": end + 2}}),
    ]


def load(folder: pathlib.Path, files: dict) -> CLIPTokenizer:
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_bytes((FOLDER / name).read_bytes())
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    return CLIPTokenizer.from_pretrained(folder)


def main():
    gen = rng("tokenizer", "corpus")
    corpus = [prompt(gen) for _ in range(1500)] + [" ".join(words) for words in LISTS.values()]
    merges = learn(corpus)
    characters = list(byte_characters())
    vocab = characters + [c + "</w>" for c in characters] + [a + b for a, b in merges] + [START, END]
    assert len(set(vocab)) == len(vocab)
    ids = {token: i for i, token in enumerate(vocab)}
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "vocab.json").write_text(json.dumps(ids, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    text = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges)
    (FOLDER / "merges.txt").write_text(text, encoding="utf-8")

    gen = rng("tokenizer", "prompts")
    concepts = ["a <my-cat> and <My-Dog>", "<MY-CAT><my-dog>", "x<my-cat>y !"]
    prompts = concepts + HARD + [prompt(gen) for _ in range(450)]
    recorded = []
    for number, (name, pad, files) in enumerate(variants(ids[START], ids[END])):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as saved:
            tokenizer = load(pathlib.Path(folder), files)
            tokenizer.save_pretrained(saved)
            again = CLIPTokenizer.from_pretrained(saved)
        assert tokenizer.pad_token == pad and tokenizer.pad_token_id == ids[pad], name
        shown = prompts if number < 2 else prompts[:150]
        rows = []
        for text in shown:
            row = tokenizer(text, padding="max_length", truncation=True, max_length=LENGTH)["input_ids"]
            assert len(row) == LENGTH
            bare = tokenizer(text, truncation=True, max_length=LENGTH)["input_ids"]
            assert row == bare + [ids[pad]] * (LENGTH - len(bare)), text
            if number < 2:
                assert bare == again(text, truncation=True, max_length=LENGTH)["input_ids"], text
            rows.append(bare)
        if number > 0:
            differ = sum(a != b for a, b in zip(rows, recorded[0]["ids"]))
            print(f"{name}: {len(rows)} prompts, {differ} differ from {recorded[0]['name']}")
            rows = [None if a == b else a for a, b in zip(rows, recorded[0]["ids"])]
        recorded.append({"name": name, "files": files, "pad": ids[pad], "ids": rows})
    longest = sum(len(row) == LENGTH for row in recorded[0]["ids"])
    print(f"{len(prompts)} prompts, {longest} of {LENGTH} tokens")
    versions = {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__}
    cases = {"length": LENGTH, "prompts": prompts, "variants": recorded, "versions": versions}
    (FOLDER / "cases.json").write_text(json.dumps(cases, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    for path in sorted(FOLDER.iterdir()):
        report(path)


if __name__ == "__main__":
    main()
