"""What others publish for jobs like those that gpu_day.py trains, with their settings. Nothing here is measured."""

import report

TITLE = "Published by others for one H100, or a GPU of eight"
COLUMNS = {
    "job": "",
    "software": "",
    "setting": "",
    "tokens/s a GPU": ",.0f",
    "MFU": ".3f",
    "source": "",
}
NOTE = "MFU by the formula above, from the tokens/s. None was measured beside jaxpar; other machines and other settings."
SPEEDRUN = "github.com/KellerJordan/modded-nanogpt, records"
ROWS = (
    (
        "Llama 3.1 8B, LoRA of rank 16",
        "NeMo AutoModel, PyTorch",
        "one GPU, all products, 2 rows of 4,096 tokens, 32 rows a step, bfloat16",
        12_473,
        0.486,
        "docs.nvidia.com/nemo/automodel, performance summary",
    ),
    (
        "GPT-2 of 124M",
        "llm.c",
        "8 GPUs, 65,536 tokens a GPU and step in rows of 1,024, bfloat16, AdamW",
        468_000,
        0.407,
        f"{SPEEDRUN}, 2024-10-13",
    ),
    (
        "A modernised GPT-2 of 124M",
        "PyTorch 2.5, torch.compile",
        "8 GPUs, as many tokens, Muon",
        462_000,
        0.401,
        f"{SPEEDRUN}, 2024-10-18",
    ),
)


def table() -> report.Table:
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in ROWS]
    return report.Table(TITLE, COLUMNS, rows, "data 8, or one device", NOTE)
