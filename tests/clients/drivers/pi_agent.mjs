// pi, run once without a terminal.
import { spawnSync } from "node:child_process";
import { mkdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const [baseUrl] = process.argv.slice(2);
const program = join(dirname(fileURLToPath(import.meta.url)), "node_modules", ".bin", "pi");
const settings = join(process.env.HOME, ".pi", "agent");
const model = { id: "m", contextWindow: 32000, maxTokens: 4000 };
const router = { baseUrl, apiKey: "none", api: "openai-completions", models: [model] };
mkdirSync(settings, { recursive: true });
writeFileSync(join(settings, "models.json"), JSON.stringify({ providers: { router } }));
const options = ["--print", "--offline", "--no-session", "--provider", "router", "--model", "m"];
const ended = spawnSync(program, [...options, "Add 17 and 25 in the file sum."], {
  stdio: ["ignore", "inherit", "inherit"],
});
process.exit(ended.status ?? 1);
