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
            "I have waited {n} days for the {thing}. When does it arrive?",
            "The tracking number for the {thing} does not work.",
            "The delivery of the {thing} is late.",
            "The {thing} was sent to the wrong address.",
            "Nobody was at home when the courier came with the {thing}.",
            "Can you tell me when my parcel will be delivered?",
        ],
        [
            "The courier still has not brought the {thing} I ordered.",
            "Delivery of my {thing} is {n} days late.",
            "My {thing} was due last week and the parcel has not arrived.",
        ],
    ),
    "HERON-27": (
        [
            "I was charged twice for the {thing}.",
            "My card statement shows {n} payments for one {thing}.",
            "The invoice for the {thing} has the wrong amount on it.",
            "Why was I billed {n} euros more than the price of the {thing}?",
            "Please send me a corrected invoice for the {thing}.",
            "I never received an invoice for the {thing}.",
            "The payment for the {thing} was taken from the wrong card.",
            "The bill for the {thing} is higher than what I agreed to pay.",
            "My bank shows a charge from you that I do not know.",
            "I paid for the {thing}, but you say that the payment failed.",
        ],
        [
            "There is a double charge on my card for a single {thing}.",
            "The amount on the invoice is not what I paid for the {thing}.",
            "I was billed {n} times for the same {thing}.",
        ],
    ),
    "OTTER-33": (
        [
            "I would like to return the {thing}, it does not suit me.",
            "How do I return the {thing} that I bought {n} days ago?",
            "The {thing} is the wrong size. Can I exchange it?",
            "I changed my mind about the {thing} and want to send it back.",
            "Please give me a return label for the {thing}.",
            "Can I send the {thing} back without the box?",
            "I want to exchange the {thing} for another colour.",
            "How many days do I have to return the {thing}?",
            "I sent the {thing} back and would like my money returned.",
            "The {thing} was a gift and I want to exchange it.",
        ],
        [
            "Can I return the {thing}? I have had it for {n} days and never used it.",
            "I need to exchange the {thing} for a smaller one.",
            "I want to send the {thing} back, where is the return label?",
        ],
    ),
    "BADGER-48": (
        [
            "The {thing} broke after {n} days of normal use.",
            "My {thing} arrived with a crack in it.",
            "The {thing} does not switch on any more.",
            "A part of the {thing} came off in my hand.",
            "The {thing} makes a terrible noise and then stops.",
            "The {thing} was broken when I opened the box.",
            "The {thing} is defective and I want it repaired.",
            "The handle of the {thing} is cracked.",
            "The {thing} stopped working after {n} weeks.",
            "The {thing} is damaged on one side.",
        ],
        [
            "After only {n} days the {thing} is broken.",
            "The {thing} was damaged when it came out of the box.",
            "My {thing} stopped working and does not switch on.",
        ],
    ),
    "LYNX-52": (
        [
            "I cannot log in, the password for my account is refused.",
            "The site locked my account after {n} attempts to log in.",
            "I never get the e-mail for a new password.",
            "How do I change the e-mail address of my account?",
            "My account shows somebody else's name after I log in.",
            "I forgot my password and the reset link does not work.",
            "My login fails with error {n}.",
            "I want to change the password of my account.",
            "The login page does not accept my e-mail address.",
            "Somebody else uses my account; please lock it.",
        ],
        [
            "My login fails although I have reset my password {n} times.",
            "I am locked out of my account and no reset e-mail comes.",
            "The password that I set {n} days ago is refused at login.",
        ],
    ),
    "PUFFIN-65": (
        [
            "Does the {thing} come in a larger size?",
            "Is the {thing} safe for children under {n}?",
            "What material is the {thing} made of?",
            "Will you have the {thing} in stock again soon?",
            "Which of your models of {thing} is the lightest?",
            "Does the {thing} come in green?",
            "How heavy is the {thing}?",
            "Is the {thing} waterproof?",
            "What is the difference between your {n} models of {thing}?",
            "How long does the battery of the {thing} last?",
        ],
        [
            "Before I buy: is the {thing} waterproof, and how heavy is it?",
            "Does the {thing} come in blue, and is it in stock?",
            "Which model of {thing} is the best for a family of {n}?",
        ],
    ),
    "MARTEN-71": (
        [
            "The voucher for {n} euros is not accepted at the till.",
            "My discount code did not work when I ordered the {thing}.",
            "Can I use {n} vouchers for one {thing}?",
            "My gift card says that it has no balance left.",
            "The discount for the {thing} was not taken off the price.",
            "My voucher has expired, can you extend it?",
            "Where do I enter the discount code for the {thing}?",
            "The gift card that I bought does not work.",
            "I got a voucher by mail and the code is not valid.",
            "The discount of {n} percent is missing from my order.",
        ],
        [
            "The shop does not accept my voucher for the {thing}.",
            "I have a gift card over {n} euros and the code is not valid.",
            "My discount code for the {thing} has expired.",
        ],
    ),
    "SWIFT-89": (
        [
            "Please stop sending me the newsletter.",
            "Delete all the personal data that you hold about me.",
            "I get {n} advertising mails a week and want none.",
            "Send me a copy of the personal data you keep.",
            "Take my telephone number off your mailing list.",
            "Unsubscribe me from the newsletter, I asked {n} times.",
            "I do not want any more advertising from you.",
            "Who has access to my personal data?",
            "I never agreed to get your newsletter.",
            "Remove me from the mailing list for advertising.",
        ],
        [
            "Take me off your mailing list, I wrote {n} times already.",
            "Under privacy law I ask you to delete my personal data.",
            "I want no more newsletter and no advertising mails.",
        ],
    ),
}
TRAIN_THINGS = ["kettle", "tent", "lamp", "rucksack", "bicycle pump", "radio", "jacket", "toaster"]
HELDOUT_THINGS = ["desk fan", "camping stove", "headset", "suitcase", "coffee grinder"]
ROWS_PER_DESK, HELDOUT_ROWS = 30, 50


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
            phrasing = phrasings[tries % len(phrasings)]
            texts.add(ticket(phrasing, things=TRAIN_THINGS, draw=draw))
            tries += 1
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
