"""For mkdocs: search for Chinese words, which mkdocs' own search cannot find. It indexes each character and each pair of them.

The index is built in the browser by lunr, whose trimmer removes Chinese characters, and whose Chinese tokenizer needs Node.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

BUILDS, SEARCHES = "  if (data.index) {\n", "  var results = index.search(query);\n"
TOKENIZER = r"""
var han = /[\u4e00-\u9fff]+/g;
function pairs(run) { // a character, or each two neighbours
  var found = [];
  for (var i = 0; i < Math.max(run.length - 1, 1); i++) found.push(run.substr(i, 2));
  return found;
}
function useChinese() {
  var tokenize = lunr.tokenizer, trim = lunr.trimmer;
  var withSeparator = function (text, metadata) {
    if (typeof text === "string") {
      text = text.replace(han, function (run) { return " " + run.split("").concat(pairs(run)).join(" ") + " "; });
    }
    return tokenize(text, metadata);
  };
  withSeparator.separator = tokenize.separator;
  lunr.tokenizer = withSeparator;
  lunr.trimmer = function (token) { return /[\u4e00-\u9fff]/.test(token.toString()) ? token : trim(token); };
  lunr.Pipeline.registerFunction(lunr.trimmer, "trimmerWithChinese");
}
function withChinese(query) {
  return query.replace(han, function (run) { return " +" + pairs(run).join(" +") + " "; });
}
"""


def on_post_build(config: MkDocsConfig) -> None:
    """Changes the script of the search."""
    script = Path(config.site_dir) / "search" / "worker.js"
    text = script.read_text()
    for line in (BUILDS, SEARCHES):
        if text.count(line) != 1:
            raise ValueError(
                f"mkdocs' search must have the line {line.strip()!r}; got another version. Adapt docs/search.py."
            )
    text = text.replace(BUILDS, f"  useChinese();\n{BUILDS}")
    text = text.replace(SEARCHES, SEARCHES.replace("(query)", "(withChinese(query))"))
    script.write_text(TOKENIZER.lstrip() + text)
