"""GET and DELETE /models: the catalog's base models and the account's own."""

from __future__ import annotations

from starlette.responses import Response

from api.control import Call
from api.http.idempotency import delete_once
from api.http.json_response import json_response
from api.schemas.models import base_model_object, fine_tuned_model_object, model_deleted
from domain.catalog import CATALOG
from domain.commands.models import DeleteModel, delete_model
from domain.errors import InvalidRequest, NotFound
from projections.work import models
from projections.work.models import ModelRow


async def list_all(call: Call) -> Response:
    """The whole catalog, then the account's models; OpenAI's list has no pages."""
    own = await call.read(models.list_all, account_id=call.caller.account_id)
    shown = [base_model_object(base) for base in CATALOG.values()]
    shown += [fine_tuned_model_object(row) for row in own]
    return json_response({"object": "list", "data": shown})


async def retrieve(call: Call) -> Response:
    """One model."""
    name = call.request.path_params["model"]
    base = CATALOG.get(name)
    if base is not None:
        return json_response(base_model_object(base))
    return json_response(fine_tuned_model_object(await own_model(call, name)))


async def delete(call: Call) -> Response:
    """Makes one of the account's models unusable and deletes its adapter's files."""
    name = call.request.path_params["model"]
    if name in CATALOG:
        raise InvalidRequest(
            "This is a base model of the catalog. Only your own ft: models can be deleted.",
            param="model",
        )
    account_id = call.caller.account_id
    await delete_once(
        call,
        call.execute(delete_model, DeleteModel(account_id=account_id, model=name)),
        deleted_at=lambda: call.read(models.deleted_at, account_id=account_id, model=name),
    )
    return json_response(model_deleted(name))


async def own_model(call: Call, name: str) -> ModelRow:
    """A fine-tuned model of the account. Raises NotFound."""
    row = await call.read(models.get, account_id=call.caller.account_id, model=name)
    if row is None:
        raise NotFound("No such model.", param="model")
    return row
