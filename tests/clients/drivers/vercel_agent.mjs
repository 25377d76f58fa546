// Vercel's AI SDK.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [baseURL, mode] = process.argv.slice(2);
const task = {
  model: createOpenAICompatible({ name: 'router', baseURL, apiKey: 'none' })('m'),
  system: 'Be brief.',
  prompt: 'What is 17 plus 25?',
  stopWhen: stepCountIs(20),
  maxRetries: 0,
  tools: {
    add: tool({
      description: 'Adds two numbers.',
      inputSchema: z.object({ a: z.number(), b: z.number() }),
      execute: async ({ a, b }) => String(a + b),
    }),
    look: tool({
      description: 'Looks something up.',
      inputSchema: z.object({ name: z.string() }),
      execute: async ({ name }) => `${name}: nothing`,
    }),
  },
};
console.log(mode === 'streamed' ? await streamText(task).text : (await generateText(task)).text);
