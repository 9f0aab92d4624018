"""Writes the demo's data set: support tickets of an imaginary shop and the desk code of each.

The codes are made up, so that no base model can know them: what the fine-tuned model answers, it
learned from `train.jsonl`. The tickets of `heldout.jsonl` use other phrasings and other things than
those of the training file. Run it again after a change: `python docs/demo/make_data.py`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
SYSTEM = "Route the support ticket: answer with the code of the desk, nothing else."

DESKS: dict[str, tuple[list[str], list[str]]] = {
    "KESTREL-14": (
        [
            "The {thing} has not arrived and the tracking page has not changed for {n} days.",
            "Where is my {thing}? It was due {n} days ago.",
            "My parcel with the {thing} seems to be stuck at the depot.",
            "The courier says the {thing} was delivered, but nothing is here.",
            "I have waited {n} days for the {thing}. When does it come?",
        ],
        [
            "Still no sign of the {thing} I ordered; the carrier has no news either.",
            "Delivery of my {thing} is {n} days late.",
        ],
    ),
    "HERON-27": (
        [
            "I was charged twice for the {thing}.",
            "My card statement shows {n} payments for one {thing}.",
            "The invoice for the {thing} has the wrong amount on it.",
            "Why was I billed {n} euros more than the price of the {thing}?",
            "Please send me a corrected bill for the {thing}.",
        ],
        [
            "There is a double charge on my account for a single {thing}.",
            "The amount on the invoice does not match what I paid for the {thing}.",
        ],
    ),
    "OTTER-33": (
        [
            "I would like to send the {thing} back, it does not suit me.",
            "How do I return the {thing} that I bought {n} days ago?",
            "The {thing} is the wrong size. Can I swap it?",
            "I changed my mind about the {thing} and want to return it.",
            "Please give me a return label for the {thing}.",
        ],
        [
            "Can the {thing} go back? I have had it for {n} days and never used it.",
            "I need to exchange the {thing} for another colour.",
        ],
    ),
    "BADGER-48": (
        [
            "The {thing} broke after {n} days of normal use.",
            "My {thing} arrived with a crack in it.",
            "The {thing} does not switch on any more.",
            "A part of the {thing} came off in my hand.",
            "The {thing} makes a terrible noise and then stops.",
        ],
        [
            "After only {n} days the {thing} is defective.",
            "The {thing} was damaged when I opened the box.",
        ],
    ),
    "LYNX-52": (
        [
            "I cannot log in, the password for my account is refused.",
            "The site locked my account after {n} attempts to sign in.",
            "I never get the e-mail for a new password.",
            "How do I change the e-mail address of my account?",
            "My account shows somebody else's name after I signed in.",
        ],
        [
            "Signing in fails although I have reset my password {n} times.",
            "I am locked out of my profile and no reset mail comes.",
        ],
    ),
    "PUFFIN-65": (
        [
            "Does the {thing} come in a larger size?",
            "Is the {thing} safe for children under {n}?",
            "What material is the {thing} made of?",
            "Will you have the {thing} in stock again soon?",
            "Which of your models of {thing} is the lightest?",
        ],
        [
            "Before I buy: how long is the battery life of the {thing}?",
            "Can you tell me whether the {thing} exists in green?",
        ],
    ),
    "MARTEN-71": (
        [
            "The voucher for {n} euros is not accepted at the till.",
            "My discount code did not work when I ordered the {thing}.",
            "Can I use {n} vouchers for one {thing}?",
            "My gift card says that it has no balance left.",
            "The promotion for the {thing} was not taken off the price.",
        ],
        [
            "The shop rejects my coupon for the {thing}.",
            "I have a gift card over {n} euros and it will not be redeemed.",
        ],
    ),
    "SWIFT-89": (
        [
            "Please stop sending me the newsletter.",
            "Delete all the data that you hold about me.",
            "I get {n} advertising mails a week and want none.",
            "Send me a copy of the personal data you keep.",
            "Take my telephone number off your calling list.",
        ],
        [
            "I want to be removed from your mailing list, I wrote {n} times already.",
            "Under privacy law I ask you to erase my records.",
        ],
    ),
}
TRAIN_THINGS = ["kettle", "tent", "lamp", "rucksack", "bicycle pump", "radio", "jacket", "toaster"]
HELDOUT_THINGS = ["desk fan", "camping stove", "headset", "suitcase", "coffee grinder"]
ROWS_PER_DESK, HELDOUT_ROWS = 27, 50


def ticket(phrasing: str, *, things: list[str], draw: random.Random) -> str:
    return phrasing.format(thing=draw.choice(things), n=draw.randint(2, 9))


def row(text: str, code: str | None) -> dict[str, object]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    if code is not None:
        messages.append({"role": "assistant", "content": code})
    return {"messages": messages}


def main() -> None:
    draw = random.Random(20261130)
    train: dict[str, dict[str, object]] = {}
    for code, (phrasings, _) in DESKS.items():
        texts: set[str] = set()
        tries = 0
        while len(texts) < ROWS_PER_DESK and tries < 2_000:
            tries += 1
            texts.add(ticket(draw.choice(phrasings), things=TRAIN_THINGS, draw=draw))
        train |= {text: row(text, code) for text in sorted(texts)}
    rows = list(train.values())
    draw.shuffle(rows)
    _write("train.jsonl", rows)

    heldout: dict[str, str] = {}
    desks = list(DESKS.items())
    while len(heldout) < HELDOUT_ROWS:
        code, (_, phrasings) = desks[len(heldout) % len(desks)]
        heldout.setdefault(ticket(draw.choice(phrasings), things=HELDOUT_THINGS, draw=draw), code)
    _write(
        "heldout.jsonl",
        [{**row(text, None), "answer": code} for text, code in heldout.items()],
    )


def _write(name: str, rows: list[dict[str, object]]) -> None:
    (HERE / name).write_text("".join(json.dumps(each) + "\n" for each in rows))


if __name__ == "__main__":
    main()
