"""Price lists: publishing them, and the one that new work is quoted with."""

from __future__ import annotations

from dataclasses import dataclass

from domain import ids
from domain.errors import NotFound
from domain.ledger.price_book import PriceBook
from domain.ledger.prices import PriceList
from domain.log.unit_of_work import UnitOfWork


@dataclass(frozen=True, slots=True)
class PublishPrices:
    prices: PriceList


def publish_prices(uow: UnitOfWork, command: PublishPrices) -> None:
    """Publishes a price list; the same one again is no change. Raises InvalidRequest."""
    book = uow.find(PriceBook, ids.PRICE_BOOK_ID)
    if book is None:
        uow.add(PriceBook(id=ids.PRICE_BOOK_ID, envelope=uow.envelope, prices=command.prices))
    else:
        book.publish(command.prices, envelope=uow.envelope)


def current_prices(uow: UnitOfWork) -> PriceList:
    """The list that new work pins. Raises NotFound before the first one is published."""
    book = uow.find(PriceBook, ids.PRICE_BOOK_ID)
    if book is None:
        raise NotFound("No prices are published yet, so no work can be created.")
    return book.in_force(uow.now)
