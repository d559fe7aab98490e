"""A sample of what a model writes: what is asked for, and what comes of it, line by line.

The process that samples reads one `SampleAsked` as JSON from its standard input, and tells a
`SampleLine` per line on its standard output:

    begun, text, text, ..., done        or, in the place of any of them and of all behind it:
    failed
"""

from functools import partial
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from diloco_shared.protocol.messages import Count, Message, Reason
from diloco_shared.protocol.wire import read_line

# What fits a page. Whoever wants more has `diloco generate` on a machine of his own.
TOKENS_MAX = 512
# Of a prompt: a page of text. It is read on the coordinator's processor before the first token.
PROMPT_CHARS_MAX = 4096
# As the sampler has it: beyond this every token is as likely as any other.
TEMPERATURE_MAX = 100.0
# What a line may have at most, in bytes of JSON: a prompt of characters that are escaped.
LINE_BYTES_MAX = 64 << 10

Prompt = Annotated[str, Field(max_length=PROMPT_CHARS_MAX)]
Tokens = Annotated[int, Field(ge=1, le=TOKENS_MAX)]
Temperature = Annotated[float, Field(ge=0.0, le=TEMPERATURE_MAX)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class SampleAsked(Message):
    """What to write. `chat`: the prompt is a user's message, and is answered."""

    prompt: Prompt = ""  # text that the model goes on with
    tokens: Tokens  # that it writes at most
    temperature: Temperature  # logits are divided by it; 0: always the likeliest token
    seed: Seed = 0  # of the random choices: the same again gives the same text
    chat: bool = False


class SampleBegun(Message):
    """The model is there and takes the prompt."""

    kind: Literal["begun"] = "begun"


class SampleText(Message):
    """What comes next: whole characters, of one token or some."""

    kind: Literal["text"] = "text"
    text: str  # to be appended to what came before


class SampleDone(Message):
    """That was all: so many pieces of text."""

    kind: Literal["done"] = "done"
    pieces: Count  # how many `SampleText` lines came before


class SampleFailed(Message):
    """Nothing more will come, and why."""

    kind: Literal["failed"] = "failed"
    reason: Reason


SampleLine = SampleBegun | SampleText | SampleDone | SampleFailed
_LINE: TypeAdapter[SampleLine] = TypeAdapter(Annotated[SampleLine, Field(discriminator="kind")])
# What a line says; None for one that is none of these.
parse_line = partial(read_line, _LINE)
