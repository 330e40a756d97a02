"""The ClientApp: carries a letter to the guard of its silo and the answer back. It has no table and no key."""

from __future__ import annotations

from typing import Final

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedveil.flower.relay import ask

RECORD: Final = "fedveil"
"""The record of a Flower message that holds a letter under the key "letter", or why there is none under "refused"."""

app = ClientApp()


@app.query()
def answer(message: Message, context: Context) -> Message:
    """Answer one letter."""
    letter = message.content.config_records[RECORD]["letter"]
    assert isinstance(letter, bytes)
    reply = ask(str(context.node_config["guard"]), letter)
    return Message(RecordDict({RECORD: ConfigRecord({"letter": reply})}), reply_to=message)
