// OpenCode, run once without a terminal.
import { spawnSync } from "node:child_process";
import { writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const [baseURL] = process.argv.slice(2);
const packages = join(dirname(fileURLToPath(import.meta.url)), "node_modules");
const program = join(packages, "opencode-linux-x64", "bin", "opencode");
const router = {
  npm: "@ai-sdk/openai-compatible",
  options: { baseURL, apiKey: "none" },
  models: { m: { tool_call: true, limit: { context: 32000, output: 4000 } } },
};
writeFileSync("opencode.json", JSON.stringify({ provider: { router }, model: "router/m", share: "disabled" }));
const ended = spawnSync(program, ["run", "--model", "router/m", "Add 17 and 25 in the file sum."], {
  stdio: ["ignore", "inherit", "inherit"],
  env: { ...process.env, OPENCODE_DISABLE_AUTOUPDATE: "1", OPENCODE_DISABLE_MODELS_FETCH: "1" },
});
process.exit(ended.status ?? 1);
