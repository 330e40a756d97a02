"""Paths and header fields of the mailbox."""

from typing import Final

MESSAGE_PATH: Final = "/v1/message"
ANSWER_PATH: Final = "/v1/answer"
MEMBERS_PATH: Final = "/v1/members"
MESSAGES_PATH: Final = "/v1/messages"
ANSWERS_PATH: Final = "/v1/answers"

TAG_HEADER: Final = "ETag"
"""Names the offer of a message; a silo returns it as ``If-None-Match``, and as ``Answers`` with its answer."""

MAILBOX_HEADER: Final = "Mailbox"
"""Name of the mailbox process; a new one means that nothing has been offered to it."""
