"""Shapes of answers: OpenAI's completion and chat objects, whole and in chunks."""

from typing import Any

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's stand-in
Logprobs = list[list[tuple[str, float, bytes]]]  # per token (string, logprob, bytes), the chosen one first


class CompletionForm:
    """Objects of ``/v1/completions``."""

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def choice(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        """One choice of an answer, ``delta`` of a chunk."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    delta = choice

    def opening(self, index: int) -> None:
        """No choice before the first token."""

    def logprobs(self, tokens: Logprobs, offset: int, num_top: int) -> dict[str, Any]:
        """Log-probabilities of new tokens, the first at character ``offset``; alternatives are what the engine gave."""
        texts = [entry[0][0] for entry in tokens]
        offsets = [offset + len("".join(texts[:place])) for place in range(len(texts))]
        tops: list[dict[str, float]] = []
        for entry in tokens:
            top: dict[str, float] = {}
            for text, value, _ in entry:
                top.setdefault(text, _finite(value))  # of equal strings the more probable token
            tops.append(top)
        values = [_finite(entry[0][1]) for entry in tokens]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


class ChatForm:
    """Objects of ``/v1/chat/completions``."""

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        """One choice of an answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def delta(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        """One choice of a chunk."""
        return {"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int) -> dict[str, Any]:
        """Choice before the first token: the role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def logprobs(self, tokens: Logprobs, offset: int, num_top: int) -> dict[str, Any]:
        """Log-probabilities of new tokens, with the ``num_top`` most probable ones of each."""

        def described(text: str, value: float, utf8: bytes) -> dict[str, Any]:
            return {"token": text, "logprob": _finite(value), "bytes": list(utf8)}

        content = []
        for entry in tokens:
            best = sorted(entry, key=lambda one: -one[1])[:num_top]
            content.append({**described(*entry[0]), "top_logprobs": [described(*one) for one in best]})
        return {"content": content, "refusal": None}


def usage(num_prompt: int, num_generated: int) -> dict[str, int]:
    """Return the numbers of tokens of one call."""
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_generated, "total_tokens": num_prompt + num_generated,
    }  # fmt: skip


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
