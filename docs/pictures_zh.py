"""The Chinese labels of the guide's pictures, and their font: `python docs/pictures_zh.py FONT.otf` cuts it from a whole font.

A picture is drawn once, with English labels; then its labels are replaced, and it is saved again. fonts/labels.otf has only the
characters of these labels: it is part of Noto Sans CJK, under the SIL Open Font License (fonts/OFL.txt).
"""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.text import Text

FONT = Path(__file__).parent / "fonts" / "labels.otf"
LABELS: tuple[tuple[str, str], ...] = (
    # the neuron
    (r"area\n(.+)", r"面积\n\1"),
    (r"bedrooms\n(.+)", r"卧室数\n\1"),
    (r"add up,\n(.+)", r"相加，\n\1"),
    (r"price\n(.+) USD", r"价格\n\1 美元"),
    ("bias", "偏置"),
    ("inputs", "输入"),
    ("outputs", "输出"),
    ("weights", "权重"),
    # weights of a pair of layers
    ("nothing\nsent", "无需\n通信"),
    (r"on GPU (\d)", r"在 GPU \1 上"),
    ("on both", "两块 GPU 上都有"),
    # experts
    ("experts", "各 expert"),
    ("by weight,\nadded up", "按权重\n相加"),
    # FP8
    ("gradients / scale", "梯度 / scale"),
    ("becomes 0", "成为 0"),
    (r"a byte \(e5m2\): (\S+) to (\S+)", r"一个字节（e5m2）：\1 到 \2"),
    # four bits
    ("weights / scale", "权重 / scale"),
    ("a byte", "一个字节"),
    (r"the scale of (\d+) weights", r"\1 个权重的 scale"),
    # a row over context
    (r"a row, cut into (\d) chunks", r"一行，切成 \1 块"),
    (r"device (\d)", r"设备 \1"),
    ("all-gather of K, V", "all-gather：K、V"),
    (
        "each device: its own queries,\nall keys up to them, equal areas",
        "每块设备：自己的 query 与\n在此之前的 key，面积相同",
    ),
    ("keys", "key"),
    ("queries", "query"),
    # recall
    ("ln 26: a guess", "ln 26：什么也没学"),
    (r"a window of (\d+) tokens", r"\1 个 token"),
    ("the whole row", "完整的一行"),
    ("attention to", "每次读"),
    (r"The answers lie (\d+) tokens back, or more", r"要读的在 \1 个 token 之前"),
    # timelines
    (r"stage (\d+)", r"阶段 \1"),
    (
        r"(\S+), (\d+) stages, (\d+) microbatches, free-running: done at (\d+), ([\d.]+%) idle",
        r"\1，\2 个阶段，\3 个微批次，各阶段自由运行：完成于 \4，空闲 \5",
    ),
    (
        r"(\S+) \(fused\), (\d+) stages, (\d+) microbatches, lock-step, (\d+) ticks: done at (\d+), ([\d.]+%) idle",
        r"\1（jaxpar 实际运行的融合形式），\2 个阶段，\3 个微批次，按 \4 拍同步运行：完成于 \5，空闲 \6",
    ),
    ("time; one forward = 1", "时间；一次前向 = 1"),
    (
        "time; one forward = 1. Blue: forward; orange, green: backward",
        "时间；一次前向 = 1。蓝：前向；橙、绿：反向",
    ),
    (
        r"The pipeline of the 8 devices: ([\d.]+%) of the time is idle",
        r"8 块设备上的各个阶段：空闲 \1",
    ),
    ("The loss is that of one device", "损失与一块设备上的相同"),
    ("1 device", "1 块设备"),
    (r"8 devices: (.+)", r"8 块设备：\1"),
    ("F  forward", "F  前向"),
    (r"B  backward \(gradients of inputs and weights\)", "B  反向（输入与权重的梯度）"),
    ("B  backward for inputs", "B  反向：输入的梯度"),
    ("W  backward for weights", "W  反向：权重的梯度"),
    # memory at rest
    ("parameters", "参数"),
    ("gradients", "梯度"),
    ("GiB on each GPU, at rest", "每块 GPU 的静态显存（GiB）"),
    (
        "Llama 7B on 8 GPUs: what each holds before the first row",
        "8 块 GPU 上的 Llama 7B：读入第一行数据之前，每块存什么",
    ),
    (r"an H100 of 80 GB holds ([\d.]+) GiB", r"80 GB 的 H100 可存 \1 GiB"),
    # the mesh on nodes
    ("Two pods of eight GPUs", "两个 pod，各有八块 GPU"),
    ("DeepSpeed's 3D figure", "DeepSpeed 的三维并行示意图"),
    (
        r"data=(\d+) x stage=(\d+) x tensor=(\d+): (\d+) GPUs on (\d+) nodes of (\d+)",
        r"data=\1 × stage=\2 × tensor=\3：\5 个节点，每个 \6 块，共 \4 块 GPU",
    ),
    (r"replica (\d+)", r"副本 \1"),
    (r"shard (\d+)", r"分片 \1"),
    (r"node (\d+)", r"节点 \1"),
    (r"GPUs (\d+)-(\d+), nodes (\d+)-(\d+)", r"GPU \1-\2，节点 \3-\4"),
    ("GPUs of one colour hold the same weights", "颜色相同的 GPU 存相同的权重"),
    ("dashed: from node to node; solid: inside a node", "虚线：跨节点；实线：节点内"),
    (
        "data, inside nodes: replicas add up gradients, once a step",
        "data，节点内：各副本的梯度相加，每步一次",
    ),
    (
        r"data, (\d+) of (\d+) hops inside nodes, (\d+) across: replicas add up gradients, once a step",
        r"data，\2 条链路中 \1 条在节点内，\3 条跨节点：各副本的梯度相加，每步一次",
    ),
    (
        "tensor, inside nodes: shards of one stage add up activations, in every layer",
        "tensor，节点内：同一阶段的分片把激活相加，每层都要",
    ),
    (
        "stage, across nodes: a stage hands activations to the next, gradients back",
        "stage，跨节点：把激活传给下一阶段，把梯度传回来",
    ),
    # replicas
    ("the batch,\ncut by rows", "批次，\n按行切分"),
    (
        "each replica: the whole model,\nits own rows, its own gradients",
        "每个副本：完整的模型，\n自己的行，自己的梯度",
    ),
    (
        "after the all-reduce: the same\nsum, the same step, everywhere",
        "all-reduce 之后：各处\n得到同样的和，走同样的一步",
    ),
    (r"rows\n(.+)", r"行\n\1"),
    (
        r"replica (\d+): w - rate ×\ngradients of rows (.+)",
        r"副本 \1：w - 学习率 ×\n第 \2 行的梯度",
    ),
    (r"replica (\d+): weights w\ngradients of rows (.+)", r"副本 \1：权重 w\n第 \2 行的梯度"),
    # server and ring
    (r"one parameter server, (\d+) GPUs", r"一台参数服务器，\1 块 GPU"),
    (r"ring all-reduce, (\d+) GPUs", r"环形 all-reduce，\1 块 GPU"),
    (
        "through each GPU's line, in and out together; G: the bytes of the gradients",
        "每块 GPU 的链路上收发合计的流量；G：梯度的字节数",
    ),
    # a run that is stopped and resumed
    ("never stopped: one device", "从未停下：一块设备"),
    (r"until step (\d+): (.+)", r"到第 \1 步：\2"),
    (r"resumed: (.+)", r"恢复之后：\1"),
    ("stopped, and resumed\non another mesh", "在此停下，\n换一个网格恢复"),
    (
        "The loss of a run that is stopped and resumed, and of one that is not",
        "停下又恢复的任务与没有停下的任务：损失",
    ),
    ("steps", "步数"),
    ("loss", "损失"),
    # house prices
    ("Where gradient descent goes on the loss surface", "梯度下降在损失曲面上的路径"),
    (r"root mean squared error \(USD\): dark is worse", "均方根误差（美元）：颜色越深，误差越大"),
    (r"root mean squared error \(USD\), log scale", "均方根误差（美元，对数坐标）"),
    (r"path of descent, (\d+) steps", r"下降的路径，\1 步"),
    ("start: predicts the mean price for all", "起点：对所有房子都预测平均价格"),
    ("least squares: the lowest point", "最小二乘：最低点"),
    ("least squares: the best there is", "最小二乘：可能的最小误差"),
    (r"weight of area \(USD per ft²\)", "面积的权重（美元/平方英尺）"),
    (r"weight of bedrooms \(USD for each\)", "卧室数的权重（美元/间）"),
    ("learning rate", "学习率"),
    ("steps of gradient descent", "梯度下降的步数"),
    (r"too small: (.+)", r"太小：\1"),
    (r"too large: (.+)", r"太大：\1"),
    (r"right: ([\d.]+)", r"合适：\1"),
    # fitting
    (r"A larger model, (\d+) digits to learn from", r"模型变大，\1 个训练数字"),
    (r"More digits to learn from, ([\d,]+) parameters", r"训练数字变多，\1 个参数"),
    (
        "left: underfitting\ntoo few units even for the\ndigits that it learns from",
        "左：欠拟合\n单元太少，连训练过的\n数字也认不好",
    ),
    (
        "right: overfitting\nknows the digits it learned\nfrom better than new ones",
        "右：过拟合\n训练过的数字认得\n比新数字好",
    ),
    ("left: overfitting\nknows a few digits by heart", "左：过拟合\n把少数数字背了下来"),
    ("right: more digits\nclose the gap", "右：数字多了，\n差距消失"),
    (r"units in each hidden layer \(parameters in all\)", "每个隐藏层的单元数（括号内为参数总数）"),
    ("digits to learn from", "训练数字的个数"),
    ("the gap: overfitting", "差距：过拟合"),
    ("test error: digits held out", "测试误差：留出的数字"),
    ("training error: digits learned from", "训练误差：训练过的数字"),
    ("share of digits read wrong", "认错的比例"),
    (r"mean of (\d+) runs; bars: best to worst", r"\1 次训练的平均；竖线：从最好到最差"),
)
PATTERNS = [(re.compile(english), chinese) for english, chinese in LABELS]


def chinese(text: str) -> str:
    """Returns a label in Chinese, line by line where no pattern has all of it; text without a pattern stays."""
    for pattern, replacement in PATTERNS:
        if found := pattern.fullmatch(text):
            return found.expand(replacement)
    if "\n" in text:
        return "\n".join(map(chinese, text.split("\n")))
    return text


@contextmanager
def also_in_chinese(path: Path) -> Iterator[None]:
    """Saves each figure of the ``with`` block a second time, with Chinese labels."""
    font_manager.fontManager.addfont(FONT)
    name = font_manager.FontProperties(fname=str(FONT)).get_name()
    known = (
        font_manager.fontManager.ttflist
    )  # a whole font of this name, if there is one, has other glyphs for the comma
    known[:] = [each for each in known if each.name != name or Path(each.fname) == FONT]
    save = Figure.savefig
    logging.getLogger("matplotlib.font_manager").setLevel(
        logging.ERROR
    )  # the font has no bold characters

    def save_both(figure: Figure, to: Any, **options: Any) -> None:
        save(figure, to, **options)
        _translate(figure)
        save(figure, path, **options)

    Figure.savefig = save_both  # the functions that draw save by themselves
    try:
        with mpl.rc_context({"font.family": ["DejaVu Sans", name]}):
            yield
    finally:
        Figure.savefig = save


def _translate(figure: Figure) -> None:
    for panel in figure.axes:
        for axis in (panel.xaxis, panel.yaxis):
            texts = [label.get_text() for label in axis.get_ticklabels()]
            if texts != [chinese(text) for text in texts]:
                axis.set_ticks(axis.get_ticklocs(), [chinese(text) for text in texts])
    for text in figure.findobj(Text):
        text.set_text(chinese(text.get_text()))


def characters() -> str:
    """Returns the characters of all labels that are not ASCII."""
    return "".join(sorted({each for _, label in LABELS for each in label if not each.isascii()}))


def simplified_glyphs(font: Any) -> dict[str, str]:
    """Returns the glyphs that the font has for simplified Chinese in place of others, such as the comma's."""
    table, found = font["GSUB"].table, {}
    for script in table.ScriptList.ScriptRecord:
        for language in script.Script.LangSysRecord:
            if language.LangSysTag.strip() == "ZHS":
                for index in language.LangSys.FeatureIndex:
                    feature = table.FeatureList.FeatureRecord[index]
                    if feature.FeatureTag == "locl":
                        for lookup in feature.Feature.LookupListIndex:
                            for part in table.LookupList.Lookup[lookup].SubTable:
                                found |= getattr(getattr(part, "ExtSubTable", part), "mapping", {})
    return found


if __name__ == "__main__":
    from fontTools import subset
    from fontTools.ttLib import TTFont

    FONT.parent.mkdir(exist_ok=True)
    whole = TTFont(sys.argv[1])
    simplified = simplified_glyphs(whole)
    for table in whole["cmap"].tables:
        if hasattr(table, "cmap"):
            table.cmap.update(
                {code: simplified.get(glyph, glyph) for code, glyph in table.cmap.items()}
            )
    options = subset.Options(layout_features=[], name_IDs=["*"])
    cut = subset.Subsetter(options)
    cut.populate(text=characters())
    cut.subset(whole)
    whole.save(FONT)
