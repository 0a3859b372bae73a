#!/usr/bin/env python3
"""Writes the tokenizer goldens: what llama.cpp makes of many lines, for three real vocabularies.

    pip install llama-cpp-python==0.3.36
    python make_goldens.py MODELS

MODELS is the folder that `gradus pull` fills (`$GRADUS_HOME/models`). Written beside this file:

  lines.jsonl            the lines, one JSON string each
  NAME.tokens.jsonl.gz   first an object about the vocabulary, then for each line its ids with
                         control tokens as plain text and, where they differ, as control tokens
  pre.jsonl.gz           for each pre-tokenizer, over the SmolLM2 vocabulary: name, ids of every
                         7th line
  smollm2.vocab.gguf.gz  the SmolLM2 vocabulary: its file without tensors

The lines come from a fixed seed, so that running this again changes nothing but what llama.cpp
changed.
"""
import ctypes
import gzip
import json
import random
import struct
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODELS = {
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3": "gemma-3-270m-q4_k_m.gguf",
    "qwen2.5": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
}
PRE = [
    "default", "llama-bpe", "dbrx", "glm4", "qwen2", "qwen35", "tekken", "gpt-4o", "gpt-2",
    "smollm", "deepseek-v3", "deepseek-llm", "deepseek-coder", "falcon",
]

TEXTS = """
The quick brown fox jumps over the lazy dog. It's what they've always said; isn't it?
WE'RE SHOUTING NOW, AREN'T WE? I'LL SAY! He'd've gone. 'Tis the season, y'all.
Dès Noël où un zéphyr haï me vêt de glaçons würmiens, je dîne d’exquis rôtis de bœuf.
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich – „ganz schön weit“.
El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia y frío, ¿añoraba a su querido cachorro?
Pchnąć w tę łódź jeża lub ośm skrzyń fig. Příliš žluťoučký kůň úpěl ďábelské ódy.
Съешь же ещё этих мягких французских булок, да выпей чаю. Щастя, ґанок, їжак.
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Θέλει αρετήν και τόλμην η ελευθερία.
דג סקרן שט בים מאוכזב ולפתע מצא חברה. נָקוּד עִבְרִי.
نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر. ١٢٣٤٥ و ۶۷۸
ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश करने वाले। १२३४
আমি কাঁচ খেতে পারি, তাতে আমার কোনো ক্ষতি হয় না। ৪৫৬
நான் கண்ணாடி சாப்பிடுவேன், அதனால் எனக்கு ஒரு கேடும் வராது.
ฉันกินกระจกได้ แต่มันไม่ทำให้ฉันเจ็บ ๑๒๓
ខ្ញុំអាចញុំកញ្ចក់បាន ដោយគ្មានបញ្ហា។ မြန်မာစာ ဖတ်တတ်တယ်။
მე მინას ვჭამ და არა მტკივა. Կրնամ ապակի ուտել և ինծի անհանգիստ չըներ։
我能吞下玻璃而不伤身体。床前明月光，疑是地上霜。二〇二四年十二月，３６５天。
私はガラスを食べられます。それは私を傷つけません。ｶﾀｶﾅ半角「引用」です。
나는 유리를 먹을 수 있어요. 그래도 아프지 않아요. ㄱㄴㄷ
እኔ ብርጭቆ መብላት እችላለሁ። ᚠᛇᚻ᛫ᛒᛦᚦ ᏣᎳᎩ ᠮᠣᠩᠭᠣᠯ ꦗꦮ 𐎠𐎼 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟏𝟐𝟑
Tôi có thể ăn thủy tinh mà không hại gì. Ｆｕｌｌｗｉｄｔｈ　ｔｅｘｔ！
""".strip().splitlines()
CODE = [
    "def f(x, *args, **kw):\n    return {k: v for k, v in kw.items() if k != '__init__'}\n",
    "fn main() -> Result<(), Box<dyn Error>> {\n\tprintln!(\"{:>8.3}\", x as f64);\n}\n",
    "for (int i = 0; i < n; ++i) {\n        a[i] += b[i] << 3; // shift\n}",
    "{\"a\": [1, 2.50, -3e-10], \"b\": {\"c\": null, \"d\": \"\\u00e9\\n\"}}",
    "<div class=\"x y\"><a href='https://example.org/?q=1&r=2#z'>link</a>&nbsp;</div>",
    "SELECT COUNT(*) AS n FROM t WHERE a >= 10 AND b LIKE '%x_%' ORDER BY 1 DESC;",
    "#!/bin/sh\nset -euo pipefail\nfind . -name '*.rs' -print0 | xargs -0 grep -n \"TODO\" || true\n",
    "x = y == z ? ~a ^ b : c && d || !e; /* ???? */ 0xDEADBEEF 0b1010 1_000_000 3.14159265358979",
    "\\begin{align}\n  \\int_0^\\infty e^{-x^2}\\,dx &= \\frac{\\sqrt{\\pi}}{2} \\\\\n\\end{align}",
    "diff --git a/x b/x\n@@ -1,3 +1,4 @@\n-old line\n+new line\n \tcontext\r\n",
    "HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n<!doctype html>",
    "class FooBarBazHTTPServerXMLParser2000 extends snake_case_name<T_Other> {}",
]
EMOJI = list("😀🎉🚀❤🔥👍🏽🙏🏿🇩🇪🇯🇵☕⚡✨") + [
    "👨‍👩‍👧‍👦", "🏳️‍🌈", "👩🏽‍💻", "❤️", "1️⃣", "🧑‍🚀", "🫠", "☺︎", "🏴󠁧󠁢󠁥󠁮󠁧󠁿",
]
SPACES = [
    " ", "  ", "   ", "    ", " " * 7, " " * 16, "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\r\n",
    "\r", " \n", "\n ", " \n \n", "\t \t", "\u00a0", "\u3000", "\u3000\u3000", "\u2003", "\u2028",
    "\u2029", "\u0085", "\u200b", "\ufeff", "\u202f", "\u1680", "\x0b", "\x0c", "\u2009\n", "\x1c",
    "\u180e", "\u2060", "\u00ad", "\n" * 8, "\n" * 40, " " * 40,
]
CONTROL = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<bos>", "<eos>", "<start_of_turn>",
    "<end_of_turn>", "<pad>", "<unk>", "<s>", "</s>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<repo_name>",
    "<reponame>", "<file_sep>", "<filename>", "<gh_stars>", "<issue_start>", "<jupyter_code>",
    "<empty_output>", "<tool_call>", "</tool_call>", "<|object_ref_start|>", "<|vision_pad|>",
    "<unused0>", "<unused99>", "<unused6241>", "<mask>", "<2mass>", "[@BOS@]", "<table>",
    "<h1>", "</h1>", "<strong>", "<start_of_image>", "<|eot_id|>", "<|im_end", "im_start|>",
    "<|im_end|", "<0x0A>", "<0xFF>", "<0x>", "▁", "▁▁", "Ġ", "Ċ", "Ġthe", "▁the", "[EMPTY_3]",
]
PUNCTUATION = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") + [
    "...", "--", "—", "…", "“", "”", "‘", "’", "«", "»", "¿", "¡", "§", "©", "™", "€", "£", "°",
    "±", "×", "÷", "≠", "≤", "∑", "∞", "→", "⇒", "•", "■", "·", "、", "。", "，", "！", "？", "：",
    "（", "）", "「", "」", "～", "''", "``", "!!!", "???", "$$", "</", "/>", "//", "/*", "*/", "=>",
]
NUMBERS = [
    "0", "7", "10", "42", "100", "123", "1234", "12345", "123456", "1234567", "3.14", "1,000,000",
    "-5", "+7", "1e10", "½", "²", "Ⅷ", "①", "٣٤", "१२३", "０１２", "1st", "2nd", "v1.2.3", "0x1F",
    "99%", "$5.00", "12:34:56", "2024-12-31", "𝟜𝟚", "𐄇", "〇", "一二三",
]
ENDINGS = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'T", "'RE", "'Ll", "'x", "’s", "'", "''s"]
MARKS = ["\u0301", "\u0308", "\u0327", "\u20dd", "\ufe0f", "\u200d", "\u0e31", "\u094d", "\u05b8"]


def any_character(rng):
    """A code point of any kind, unassigned and private ones included."""
    while True:
        plane = rng.random()
        if plane < 0.6:
            code = rng.randrange(0x20, 0x3000)
        elif plane < 0.85:
            code = rng.randrange(0x3000, 0x10000)
        else:
            code = rng.randrange(0x10000, 0x110000)
        if not 0xD800 <= code < 0xE000:
            return chr(code)


def line(rng, words):
    """A line of one of several kinds."""
    kind = rng.randrange(12)
    if kind == 0:  # prose as it is, or a part of it
        text = rng.choice(TEXTS)
        at = rng.randrange(len(text))
        return text if rng.random() < 0.4 else text[at : at + rng.randrange(1, 60)]
    if kind == 1:  # words of many scripts
        return rng.choice(["", " "]) + " ".join(rng.choices(words, k=rng.randrange(1, 12)))
    if kind == 2:  # code
        text = rng.choice(CODE)
        at = rng.randrange(len(text))
        return text if rng.random() < 0.4 else text[at : at + rng.randrange(1, 60)]
    if kind == 3:  # white space
        parts = rng.choices(SPACES, k=rng.randrange(1, 6)) + rng.choices(words, k=3)
        rng.shuffle(parts)
        return "".join(parts)
    if kind == 4:  # control tokens, whole and cut
        parts = rng.choices(CONTROL, k=rng.randrange(1, 5))
        parts += rng.choices(words + SPACES[:16] + EMOJI, k=rng.randrange(4))
        rng.shuffle(parts)
        return "".join(parts)
    if kind == 5:  # emoji
        parts = rng.choices(EMOJI, k=rng.randrange(1, 6)) + rng.choices(words + [" "], k=2)
        rng.shuffle(parts)
        return rng.choice(["", " "]).join(parts)
    if kind == 6:  # numbers and punctuation
        parts = rng.choices(NUMBERS + PUNCTUATION + [" "], k=rng.randrange(1, 14))
        return rng.choice(["", "", " "]).join(parts)
    if kind == 7:  # endings in all cases
        parts = []
        for word in rng.choices(words, k=rng.randrange(1, 5)):
            word = rng.choice([word, word.upper(), word.title(), word.swapcase()])
            parts.append(word + rng.choice(ENDINGS) + rng.choice(["", "", rng.choice(words)]))
        return " ".join(parts)
    if kind == 8:  # any characters
        return "".join(any_character(rng) for _ in range(rng.randrange(1, 24)))
    if kind == 9:  # runs
        piece = rng.choice(PUNCTUATION + ["a", "A", "ab", "é", "你", "ก", "😀", "0", "=", "-", " a"])
        return piece * rng.randrange(1, 70) + rng.choice(["", rng.choice(words)])
    if kind == 10:  # marks upon letters
        word = rng.choice(words)
        return "".join(c + (rng.choice(MARKS) if rng.random() < 0.4 else "") for c in word)
    # everything at once
    parts = []
    for _ in range(rng.randrange(2, 9)):
        parts.append(rng.choice(rng.choice([words, SPACES, PUNCTUATION, NUMBERS, EMOJI, CONTROL])))
    return "".join(parts)


def lines():
    rng = random.Random(20240229)
    words = sorted({word for text in TEXTS for word in text.split()})
    found = dict.fromkeys(TEXTS + CODE + SPACES + CONTROL + EMOJI + ["", "\0", "a\0b"])
    while len(found) < 2400:
        found[line(rng, words)] = None
    return list(found)


def strip_tensors(path, changes=None):
    """The bytes of a GGUF file (version 3) with its `tokenizer.` and a few other keys only."""
    data = path.read_bytes()[: 64 << 20]
    magic, version, _, count = struct.unpack_from("<4sIQQ", data)
    assert magic == b"GGUF" and version == 3
    at = 24
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def string(at):
        (length,) = struct.unpack_from("<Q", data, at)
        return data[at + 8 : at + 8 + length], at + 8 + length

    kept = {}
    for _ in range(count):
        start = at
        key, at = string(at)
        (kind,) = struct.unpack_from("<I", data, at)
        at += 4
        if kind == 8:
            _, at = string(at)
        elif kind == 9:
            kind, length = struct.unpack_from("<IQ", data, at)
            at += 12
            if kind == 8:
                for _ in range(length):
                    _, at = string(at)
            else:
                at += sizes[kind] * length
        else:
            at += sizes[kind]
        key = key.decode()
        if key.startswith("tokenizer.") or key in ("general.architecture", "general.name"):
            kept[key] = data[start:at]
    for key, value in (changes or {}).items():
        name, value = key.encode(), value.encode()
        kept[key] = struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, len(value)) + value
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, len(kept)) + b"".join(kept.values())


def write_gz(name, text):
    data = text if isinstance(text, bytes) else text.encode()
    (HERE / name).write_bytes(gzip.compress(data, 9, mtime=0))


def fnv(hash_, data):
    """FNV-1a, 64 bits."""
    for byte in data:
        hash_ = ((hash_ ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return hash_


def main():
    import llama_cpp

    models = Path(sys.argv[1])
    every = lines()
    (HERE / "lines.jsonl").write_text(
        "".join(json.dumps(text, ensure_ascii=True) + "\n" for text in every)
    )

    def compact(value):
        return json.dumps(value, separators=(",", ":")) + "\n"

    for name, file in MODELS.items():
        model = llama_cpp.Llama(str(models / file), vocab_only=True, verbose=False)
        vocab = llama_cpp.llama_model_get_vocab(model._model.model)
        size = llama_cpp.llama_vocab_n_tokens(vocab)
        hashes = []
        for special in (False, True):
            buffer = ctypes.create_string_buffer(1024)
            hash_ = 0xCBF29CE484222325
            for token in range(size):
                n = llama_cpp.llama_token_to_piece(vocab, token, buffer, 1024, 0, special)
                assert n >= 0
                hash_ = fnv(hash_, struct.pack("<I", n) + buffer.raw[:n])
            hashes.append(f"{hash_:016x}")
        about = {
            "file": file,
            "tokens": size,
            "bos": llama_cpp.llama_vocab_bos(vocab),
            "eos": llama_cpp.llama_vocab_eos(vocab),
            "add_bos": llama_cpp.llama_vocab_get_add_bos(vocab),
            "add_eos": llama_cpp.llama_vocab_get_add_eos(vocab),
            "eog": [t for t in range(size) if llama_cpp.llama_vocab_is_eog(vocab, t)],
            "control": [t for t in range(size) if llama_cpp.llama_vocab_is_control(vocab, t)],
            # FNV-1a over length (u32) and bytes of every token's text, without and with
            # control tokens.
            "pieces": hashes,
        }
        out = [compact(about)]
        for text in every:
            plain = model.tokenize(text.encode(), add_bos=False, special=False)
            special = model.tokenize(text.encode(), add_bos=False, special=True)
            out.append(compact([plain] if plain == special else [plain, special]))
        write_gz(f"{name}.tokens.jsonl.gz", "".join(out))
        print(name, size, "tokens;", len(every), "lines", file=sys.stderr)

    smollm2 = models / MODELS["smollm2"]
    write_gz("smollm2.vocab.gguf.gz", strip_tensors(smollm2))
    out = []
    for name in PRE:
        with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
            file.write(strip_tensors(smollm2, {"tokenizer.ggml.pre": name}))
            file.flush()
            model = llama_cpp.Llama(file.name, vocab_only=True, verbose=False)
        ids = [model.tokenize(text.encode(), add_bos=False, special=False) for text in every[::7]]
        out.append(compact([name, ids]))
    write_gz("pre.jsonl.gz", "".join(out))


if __name__ == "__main__":
    main()
