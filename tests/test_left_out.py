"""Which messages a chat template left out, and how much of the text is read to tell."""

import pytest

from jaxpar.data.left_out import roles_left_out


class CountedText(str):
    """A text that counts the characters in which something was looked for."""

    num_read = 0

    def find(self, what, first, last):
        start = super().find(what, first, last)
        end = start + len(what) if start >= 0 else last
        self.num_read += max(end - first, 0)
        return start


def conversation(contents):
    return [
        {"role": "assistant" if number % 2 else "user", "content": content}
        for number, content in enumerate(contents)
    ]


@pytest.mark.parametrize(
    ("contents", "text", "left_out"),
    [
        (["a", " b\n", ""], "<a><b>", []),
        (["a", "b"], "<a>", ["assistant"]),
        (["ab", "the ab of it"], "<the ab of it>", ["user"]),
        (["ab", "ab", "ab"], "<ab><ab>", ["user"]),
        (["a", "b", "c"], "<c><b><a>", []),
        (["a", "b", "c", "d"], "<c>", ["user", "assistant"]),
    ],
)
def test_each_message_needs_a_place_of_its_own_in_any_order(contents, text, left_out):
    assert sorted(roles_left_out(conversation(contents), text)) == sorted(left_out)


@pytest.mark.parametrize("num_messages", [100, 800])
@pytest.mark.parametrize(
    ("written", "num_left_out"),
    [
        (lambda contents: contents, 0),
        (lambda contents: contents[::2], 1),
        (lambda contents: [each[1:] for each in contents], 2),
    ],
    ids=["all", "no answers", "none as it is"],
)
@pytest.mark.parametrize("growth", [0, 1, -1])
def test_a_long_conversation_is_read_a_few_times_however_many_messages_it_has(
    num_messages, written, num_left_out, growth
):
    contents = [f"<{at:4}{'word ' * 200}{'x' * abs(growth * at)}" for at in range(num_messages)]
    contents = contents[:: growth or 1]
    text = CountedText("".join(written(contents)))
    assert len(roles_left_out(conversation(contents), text)) == num_left_out
    per_message = text.num_read / num_messages
    assert per_message < 15 * max(map(len, contents)), "each message is looked for beside others"
