"""T5's tokenizer with a small vocabulary: the files of a checkpoint, and the ids that transformers makes of prompts.

Usage: python t5_tokenizer.py

Writes tests/golden/t5_tokenizer/: `spiece.model`, trained by SentencePiece on the prompts with T5's special tokens and its
table of replacements (nmt_nfkc); `tokenizer.json`, as transformers saves it, but without that table, which is the bytes
`charsmap` (offset and length) of `spiece.model`; `ids.json`: texts, their ids without padding, and the ids of some of them
at lengths 12 and 256.
"""

import base64
import io
import json
import shutil

import sentencepiece
import transformers
from transformers import T5Tokenizer

from common import GOLDEN, report, rng

WORDS = ("a an the of on in with and under over red blue green golden tiny huge ancient futuristic painting photo "
         "lighthouse castle cat dog dragon robot city forest mountain river sunset sunrise storm watercolour portrait "
         "cinematic lighting highly detailed, 8k, style by Monet Hokusai (masterpiece:1.2) [soft] \"hello world\" don't "
         "it's café naïve Ünïcödé grün 绿色 灯塔 日本語 кошка 🦊 ½ ﬁre １２３ 3.14 2024 --ar 16:9 <b>bold</b> rock'n'roll").split(" ")
TEXTS = ["", " ", "a", "  a  lighthouse \t on\na cliff  ", "A photo of a <extra_id_0> cat</s> and a <extra_id_99> dog",
         "ﬁne ﬂowers ① ㎏ Å ñ ñ", "\u200b zero\u00a0width \u3000ideographic", "ｆｕｌｌｗｉｄｔｈ　ｔｅｘｔ", "…—“quotes”",
         "👩‍🚀 astronaut 🏳️‍🌈", "<pad> <unk> </s>", "supercalifragilisticexpialidocious " * 3, "\x00\x07 control", "a" * 300]


def prompts():
    gen = rng("t5_tokenizer")
    for _ in range(500):
        words = [WORDS[i] for i in gen.integers(0, len(WORDS), gen.integers(1, 16))]
        yield (" " if gen.random() < 0.9 else "  ").join(words)


def sentences():
    """More words than the prompts have, for pieces to learn."""
    gen = rng("t5_tokenizer", "sentences")
    syllables = [a + b for a in "bcdfghklmnprst" for b in ("a", "e", "i", "o", "u", "an", "er", "ing", "al")]
    words = ["".join(syllables[i] for i in gen.integers(0, len(syllables), gen.integers(1, 5))) for _ in range(1500)]
    for _ in range(1500):
        yield " ".join(words[i] for i in gen.integers(0, len(words), 12))


def main():
    folder = GOLDEN / "t5_tokenizer"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    texts = list(prompts())
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts + list(sentences())), model_writer=model, vocab_size=320, model_type="unigram", character_coverage=0.9995,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, pad_piece="<pad>", eos_piece="</s>", unk_piece="<unk>",
        num_threads=1, minloglevel=2)
    (folder / "spiece.model").write_bytes(model.getvalue())
    tokenizer = T5Tokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in list(folder.iterdir()):
        if path.name not in ("spiece.model", "tokenizer.json"):
            path.unlink()
    again = T5Tokenizer.from_pretrained(folder)
    texts = TEXTS + texts
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    assert ids == [again(text, add_special_tokens=False).input_ids for text in texts]
    padded = {str(length): [tokenizer(text, padding="max_length", max_length=length, truncation=True).input_ids
                            for text in texts[:20]] for length in (12, 256)}
    document = json.loads((folder / "tokenizer.json").read_text())
    table = base64.b64decode(document["normalizer"]["precompiled_charsmap"])
    document["normalizer"]["precompiled_charsmap"] = ""
    (folder / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False) + "\n")
    meta = {"charsmap": [model.getvalue().index(table), len(table)], "texts": texts, "ids": ids, "padded": padded, "vocabulary": len(tokenizer),
            "versions": {"transformers": transformers.__version__, "sentencepiece": sentencepiece.__version__}}
    (folder / "ids.json").write_text(json.dumps(meta, ensure_ascii=False) + "\n")
    for path in sorted(folder.iterdir()):
        report(path)


if __name__ == "__main__":
    main()
