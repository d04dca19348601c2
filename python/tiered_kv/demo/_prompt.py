"""The prompt: one segment for the document, one for the question."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from tiered_kv import InvalidArgumentError

_DOCUMENT_MARK = "\u241eDOCUMENT\u241e"
_QUESTION_MARK = "\u241eQUESTION\u241e"
_OPENING = "Read this text. A question about it follows.\n\n"
_ASKING = "\n\nQuestion: {} Answer in one short sentence, from the text above."
_LIMIT_BYTES = 16 << 20

QUESTIONS = (
    "Who designed the tower?",
    "Where was the lens made?",
    "What is the name of the green engine?",
    "When was the light lit for the first time?",
    "Which ship was wrecked in 1822?",
    "How many steps does the staircase have?",
    "What was the cargo of the steamer Corvina?",
    "What happened to the parrot?",
)
"""Questions about the document that comes with the package."""

GENERAL_QUESTIONS = (
    "What is this text about?",
    "Who or what does this text mention first?",
    "How does this text end?",
)
"""Questions about any other document."""


def read_document(path: Path | None) -> tuple[str, tuple[str, ...]]:
    """The document and questions on it.

    Args:
        path: A UTF-8 text file, or None for the document of the package.

    Raises:
        InvalidArgumentError: The file cannot be read as text, is empty or too long.
    """
    if path is None:
        packaged = resources.files("tiered_kv.demo") / "document.txt"
        return packaged.read_text(encoding="utf-8"), QUESTIONS
    try:
        with path.open("rb") as file:
            raw = file.read(_LIMIT_BYTES + 1)
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"document: cannot read {path} ({error}); give a UTF-8 text file"
        raise InvalidArgumentError(message) from error
    if len(raw) > _LIMIT_BYTES or not text.strip():
        message = f"document: {path} is empty or over {_LIMIT_BYTES >> 20} MiB; give another"
        raise InvalidArgumentError(message)
    return text, GENERAL_QUESTIONS


class Prompts:
    """Makes prompts of a document and a question.

    The two are tokenised apart, so that no merge of the tokenizer crosses from the document into
    the question: the document's tokens are the same whatever is asked.

    Args:
        tokenizer: The model's tokenizer.
        document: The document.
    """

    def __init__(self, tokenizer: Any, document: str) -> None:
        self._tokenizer = tokenizer
        before, self._after = _template(tokenizer)
        self._document = self._ids(before + document.strip())

    @property
    def document_tokens(self) -> int:
        """Tokens of the segment that all questions share."""
        return len(self._document)

    def segments(self, question: str) -> list[list[int]]:
        """The prompt for a question, as token ids."""
        return [self._document, self._ids(_ASKING.format(question) + self._after)]

    def text(self, tokens: list[int]) -> str:
        """An answer as one line of text."""
        return " ".join(self._tokenizer.decode(tokens, skip_special_tokens=True).split())

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _template(tokenizer: Any) -> tuple[str, str]:
    """What comes before the document, and after the question."""
    content = f"{_OPENING}{_DOCUMENT_MARK}{_QUESTION_MARK}"
    if getattr(tokenizer, "chat_template", None):
        whole = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
    else:
        whole = f"{tokenizer.bos_token or ''}{content}\n\nAnswer:"
    before, _, after = whole.partition(_DOCUMENT_MARK + _QUESTION_MARK)
    return before, after
