// The loop with the last package for older Nodes: base URL and key given.
import * as sdk from "openai";
import { VERSION } from "openai/version";
import { loop } from "../loop.mjs";

const { OPENAI_BASE_URL, OPENAI_API_KEY } = process.env;
await loop(sdk, VERSION, new sdk.OpenAI({ baseURL: `${OPENAI_BASE_URL}/`, apiKey: OPENAI_API_KEY }));
