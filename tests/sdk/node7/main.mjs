// The loop with OpenAI's current package: a client built without arguments.
import * as sdk from "openai";
import { VERSION } from "openai/version";
import { loop } from "../loop.mjs";

await loop(sdk, VERSION, new sdk.OpenAI());
