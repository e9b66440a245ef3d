// The JavaScript clients of two vendors, as their documents say: with the key from the environment.
import fs from 'node:fs';
import { createRequire } from 'node:module';
const require = createRequire(process.argv[2] + '/');
const OpenAI = require('openai');
const Anthropic = require('@anthropic-ai/sdk');

const messages = [{ role: 'user', content: 'say hello' }];

const openai = new OpenAI();
const chat = await openai.chat.completions.create({ model: 'some-model', messages });
console.log('openai:', chat.choices[0].message.content);
let parts = [];
for await (const part of await openai.chat.completions.create({ model: 'some-model', messages, stream: true })) {
  parts.push(part.choices[0].delta.content ?? '');
}
console.log('openai streams:', parts.join('|'));

const anthropic = new Anthropic();
const message = await anthropic.messages.create({ model: 'some-model', max_tokens: 9, messages });
console.log('anthropic:', message.content[0].text);
const stream = anthropic.messages.stream({ model: 'some-model', max_tokens: 9, messages });
const words = [];
stream.on('text', (text) => words.push(text));
await stream.finalMessage();
console.log('anthropic streams:', words.join('|'));

// It stays, with all it has seen in memory, until the search for keys is over.
fs.writeFileSync('node-ready', '');
while (!fs.existsSync('searched')) await new Promise((done) => setTimeout(done, 20));
